"""The lines with which a run begins, in plain words."""

from pathlib import Path

import pytest
from planned import EIGHT_80, published_job
from recipes import recipe, student_engine

from wandistiller.config.run_config import RunConfig
from wandistiller.config.summary import in_words, summary
from wandistiller.config.validate import read_job


def test_of_one_expert_there_is_one_guidance_and_no_share_of_steps(published: Path) -> None:
    text = "\n".join(summary(published_job(published, EIGHT_80)))
    assert text.count("guidance") == 1 and ", guidance 5.0\n" in text and "high-noise" not in text


def test_of_two_experts_each_has_its_guidance_and_its_share_of_the_steps(published: Path) -> None:
    job = published_job(published, EIGHT_80, "Wan2.2-T2V-A14B", shift=5.0)
    text = "\n".join(summary(job))
    assert ", guidance 4.0 at high noise and 3.0 at low noise\n" in text
    # 1 - u with u = b / (s - (s - 1) b), here b = 0.875 and s = 5
    assert (
        f" steps, {100 * (1 - 0.875 / (5 - 4 * 0.875)):.3g} % of them with the teacher's high-noise expert"
        in text
    )


def test_settings_of_trained_parts_are_in_words_and_files_by_their_names(wan1: Path, tmp_path: Path) -> None:
    tuned = {"learning_rates": {"blocks.0": 0.1, "*": 2}, "frozen": ["bias"], "ema": 0.9}
    job = read_job(RunConfig(**recipe(tmp_path, wan1, **tuned)), 1)
    lines = ["ema       0.9", "learning_rates blocks.0 0.1, * 2", "frozen    bias"]
    assert [line for line in lines if line not in summary(job)] == []
    lora = {"rank": 4, "targets": ["to_q", "ffn"], "start": "mine.safetensors"}
    assert in_words(lora) == "rank 4, targets to_q ffn, start mine.safetensors"


@pytest.mark.parametrize(("length", "warned"), [(10, True), (100, False), ("auto", False)])
def test_a_schedule_that_ends_before_the_run_is_a_warning(
    length: object, warned: bool, wan1: Path, tmp_path: Path
) -> None:
    params = {"warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": length}
    ds = student_engine(1) | {"scheduler": {"type": "WarmupDecayLR", "params": params}}
    job = read_job(RunConfig(**recipe(tmp_path, wan1, max_steps=100, deepspeed_config=ds)), 1)
    told = "warning   the schedule ends at step 10 (`total_num_steps`) of 100, "
    assert (told in "\n".join(summary(job))) is warned
