"""Runs whose teacher has quantised weights: what they print, their caches, and how they resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import wandistiller
from recipes import recipe, recipe_file
from shipped import placement

pytest.importorskip("torchao")

from on_ranks.quantized import FORMATS

from wandistiller.cli.evaluate import evaluate, read_evaluation
from wandistiller.cli.parser import read
from wandistiller.config.identity import identity
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.training.prepare import _teacher_fingerprint


@pytest.mark.slow
def test_a_run_prints_the_error_and_stands_by_its_format_when_it_resumes(tmp_path: Path, wan1: Path) -> None:
    def teacher(weights: str | None) -> dict[str, Any]:
        return {"wandistiller": {"placement": "streamed", **({"weights": weights} if weights else {})}}

    more = {"max_steps": 2, "teacher_deepspeed_config": teacher("int8")}
    file = recipe_file(tmp_path, wan1, **more)
    log = wandistiller("train", "--recipe", file).stderr
    assert "float32 with int8 blocks" in log and "int8: relative velocity error" in log
    assert log.count("relative velocity error") == 2 and " at 0.875-1" in log  # and the student's
    facts = json.loads((tmp_path / "run" / "student" / "wandistiller.json").read_text())
    assert facts["teacher_weights"] == "int8"
    file = recipe_file(tmp_path, wan1, **more | {"teacher_deepspeed_config": teacher(None), "max_steps": 3})
    error = wandistiller("train", "--recipe", file, code=2).stderr
    assert 'another teacher_weights: "int8", now not given' in error
    assert "--allow_changed teacher_weights to go on all the same" in error
    wandistiller("train", "--recipe", file, "--allow_changed", "teacher_weights")


def test_rollouts_of_each_format_have_a_cache_of_their_own(tmp_path: Path, wan1: Path) -> None:
    keys = set()
    for weights in (None, *FORMATS):
        block = {"wandistiller": {"weights": weights} if weights else {}}
        job = read_job(RunConfig(**recipe(tmp_path, wan1, teacher_deepspeed_config=block)), 1)
        keys.add(_teacher_fingerprint(job, "text"))
        assert identity(job).get("teacher_weights") == weights
    assert len(keys) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_evaluate_reports_the_error_of_a_quantised_teacher(tmp_path: Path, wan2: Path) -> None:
    file = tmp_path / "teacher.json"
    file.write_text(json.dumps(placement("owner", "float32", weights="nf4").engine.raw))
    words = "--height 32 --width 32 --steps 1 --quick --guidance_scale 1 --prompts a b".split()
    words += ["--student", wan2, "--teacher_path", wan2, "--output", tmp_path]
    words += ["--teacher_deepspeed_config", file]
    _, flags = read(["evaluate", *map(str, words)])
    result = evaluate(read_evaluation(flags, 1))
    bands = result["teacher_weights_velocity_error"]["bands"]
    assert result["teacher_weights"] == "nf4" and [*bands][-1] == "0.875-1"
    assert all(0 < error < 0.5 for error in bands.values())
    report = (tmp_path / "evaluation.md").read_text()
    assert "teacher, nf4, to unquantised" in report
    # the student is the teacher without quantising, on other states of the same bands
    of_student = result["relative_velocity_error"]["bands"]
    assert all(0.2 < of_student[band]["value"] / error < 5 for band, error in bands.items())
