"""The files that `sample` leaves in its output folder, and what it says of guidance."""

from pathlib import Path

import pytest
from drawing import GPU

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.dataset import PromptItem
from wandistiller.evaluation.candidates import read_candidate
from wandistiller.evaluation.draw_samples import output_problems, sample
from wandistiller.evaluation.sampling import Sampling, guidance_lines
from wandistiller.utils.files import write_json

SIZE = {"height": 16, "width": 16}


@pytest.mark.usefixtures("one_rank")
def test_pictures_of_an_earlier_longer_call_go_and_other_files_stay(wan1: Path, tmp_path: Path) -> None:
    (tmp_path / "0007.png").write_text("someone's own")
    for prompts in ("abc", "d"):
        items = [PromptItem(prompt) for prompt in prompts]
        candidate = read_candidate(str(wan1))
        sample(candidate, items, tmp_path, Sampling(**SIZE, steps=1), 0, GPU)
    found = sorted(file.name for file in tmp_path.iterdir())
    assert found == ["0000.png", "0007.png", "cache", "grid.png", "wandistiller_samples.json"]


@pytest.mark.parametrize(
    ("folder", "wrong"), [("", True), ("samples", True), ("drawn", False), ("new", False)]
)
def test_samples_are_not_mixed_with_the_files_of_a_run(folder: str, wrong: bool, tmp_path: Path) -> None:
    write_json(tmp_path / "resolved" / "run.json", {})
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00000001.png").touch()
    write_json(tmp_path / "drawn" / "wandistiller_samples.json", {"0000.png": "a"})
    (tmp_path / "drawn" / "0000.png").touch()
    (tmp_path / "drawn" / "cache").mkdir()
    assert bool(output_problems(tmp_path / folder)) is wrong


@pytest.mark.parametrize(
    ("learnt", "scale", "lines"), [(5.0, 5.0, 1), (5.0, 1.0, 0), (1.0, 5.0, 0), (None, 5.0, 0)]
)
def test_guidance_on_top_of_guidance_that_is_folded_in_is_told(
    learnt: float | None, scale: float, lines: int
) -> None:
    told = guidance_lines(Facts(guidance_scale=learnt), Sampling(**SIZE, guidance_scale=scale))
    assert len(told) == lines
