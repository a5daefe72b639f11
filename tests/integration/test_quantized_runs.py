"""Runs whose teacher has quantised weights: what they print, their caches, and how they resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import wandistiller
from recipes import recipe, recipe_file

pytest.importorskip("torchao")

from on_ranks.quantized import FORMATS

from wandistiller.config.identity import identity
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.training.prepare import _teacher_fingerprint


@pytest.mark.slow
def test_a_run_stands_by_its_format_when_it_resumes(tmp_path: Path, wan1: Path) -> None:
    def teacher(weights: str | None) -> dict[str, Any]:
        return {"wandistiller": {"placement": "streamed", **({"weights": weights} if weights else {})}}

    more = {"max_steps": 2, "teacher_deepspeed_config": teacher("int8")}
    file = recipe_file(tmp_path, wan1, **more)
    log = wandistiller("train", "--recipe", file).stderr
    assert "float32 with int8 blocks" in log
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
