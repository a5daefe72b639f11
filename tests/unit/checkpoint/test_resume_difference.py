"""A run that does not go on from a checkpoint is told in words what was other."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe

from wandistiller.checkpoint.loading import FORMAT, STATE
from wandistiller.checkpoint.resume import changed_keys, in_words
from wandistiller.config.identity import inputs
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.utils.errors import ConfigError

RUN = {
    "teacher_path": "wan",
    "data_path": "p.txt",
    "height": 32,
    "student_config": {"num_layers": 2},
    "guidance_scale_2": 3.0,
}
IDENTITY = {
    "teacher": "0a",
    "student": "0b",
    "data": "0c",
    "seed": 0,
    "guidance": [4.0, 3.0, "ugly"],
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "eps": 1e-8}},
    "scheduler": None,
}
FILES = {"teacher": {"transformer/config.json": "2 x", "transformer/a.safetensors": "9 y"}}
INPUTS = {"teacher_dtype": "bfloat16", "vae": "0d", "text_encoder": "0e"}
SAVED = {
    "identity": IDENTITY,
    "inputs": INPUTS,
    "run": RUN,
    "files": FILES,
    "facts": {"before": ["velocity: 3 steps"]},
}


def with_run(**changes: Any) -> dict[str, Any]:
    return SAVED | {"run": RUN | changes}


def with_identity(**changes: Any) -> dict[str, Any]:
    return SAVED | {"identity": IDENTITY | changes}


@pytest.mark.parametrize(
    ("key", "now", "words"),
    [
        ("ema", with_identity(ema=0.9), "not given, now 0.9"),
        ("guidance", with_run(guidance_scale_2=2.5), "`guidance_scale_2` was 3.0, now 2.5"),
        (
            "optimizer",
            with_identity(optimizer={"type": "AdamW", "params": {"lr": 0.002, "eps": 1e-8}}),
            "`optimizer.params.lr` was 0.001, now 0.002",
        ),
        ("data", SAVED, "what it was made of is not as it was"),
        (
            "teacher",
            SAVED | {"files": {"teacher": FILES["teacher"] | {"transformer/a.safetensors": "9 z"}}},
            "not as they were: transformer/a.safetensors",
        ),
        ("text_encoder", with_run(teacher_path="other"), '`teacher_path` was "wan", now "other"'),
    ],
)
def test_what_was_other_is_said_with_both_values(key: str, now: dict[str, Any], words: str) -> None:
    assert in_words(key, SAVED, now) == words


def refused(folder: Path, allowed: list[str], **identity: Any) -> list[str]:
    (folder / STATE).write_text(json.dumps(SAVED | {"format": FORMAT}))
    with pytest.raises(ConfigError) as caught:
        changed_keys(folder, with_identity(**identity), allowed)
    return caught.value.problems


@pytest.mark.parametrize(("allowed", "lines"), [([], 2), (["data"], 1)])
def test_every_difference_is_told_the_one_flag_that_allows_all(
    allowed: list[str], lines: int, tmp_path: Path
) -> None:
    problems = refused(tmp_path, allowed, data="1c", shift=3.0)
    assert len(problems) == lines
    assert all("or --allow_changed data shift to go on all the same." in problem for problem in problems)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("teacher_dtype", "float32", '"bfloat16", now "float32"'),
        ("vae", "1d", "what it was made of is not as it was"),
        ("text_encoder", "1e", "what it was made of is not as it was"),
    ],
)
def test_another_input_is_refused_but_not_of_a_checkpoint_that_has_none(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    now = SAVED | {"inputs": INPUTS | {key: value}}
    (tmp_path / STATE).write_text(json.dumps(SAVED | {"format": FORMAT}))
    with pytest.raises(ConfigError, match=f"another {key}: {re.escape(words)}. .* --allow_changed {key} to"):
        changed_keys(tmp_path, now, [])
    assert changed_keys(tmp_path, now, [key]) == {key}
    before = {name: part for name, part in SAVED.items() if name != "inputs"}
    (tmp_path / STATE).write_text(json.dumps(before | {"format": FORMAT}))
    assert changed_keys(tmp_path, now, []) == set()


def test_a_part_that_was_replaced_in_place_is_another_input(
    wan1: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    wan = copy_of(wan1, weights=True)
    before = inputs(read_job(RunConfig(**recipe(tmp_path, wan, output_dir="out")), 1, here=False))
    for part, key in {"vae": "vae", "tokenizer": "text_encoder"}.items():
        (wan / part / "more.txt").write_text("x")
        now = inputs(read_job(RunConfig(**recipe(tmp_path, wan, output_dir="out")), 1, here=False))
        assert {name for name in now if now[name] != before[name]} == {key}
        before = now


def test_no_flag_is_told_where_one_difference_cannot_be_allowed(tmp_path: Path) -> None:
    problems = refused(tmp_path, [], student="1b", seed=7)
    assert len(problems) == 2 and not any("--allow_changed" in problem for problem in problems)
