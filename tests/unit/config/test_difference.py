"""A run that does not go on from a checkpoint is told in words what was other."""

import json
from pathlib import Path
from typing import Any

import pytest

from wandistiller.checkpoint.difference import OTHERWISE, in_words
from wandistiller.checkpoint.loading import FORMAT, STATE
from wandistiller.checkpoint.resume import changed_keys
from wandistiller.utils.errors import ConfigError

RUN = {"teacher_path": "wan", "data_path": "p.txt", "height": 32, "student_config": {"num_layers": 2}}
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
SAVED = {"identity": IDENTITY, "run": RUN, "files": FILES, "facts": {"before": ["velocity: 3 steps"]}}


def with_run(**changes: Any) -> dict[str, Any]:
    return SAVED | {"run": RUN | changes}


def with_identity(**changes: Any) -> dict[str, Any]:
    return SAVED | {"identity": IDENTITY | changes}


@pytest.mark.parametrize(
    ("key", "now", "words"),
    [
        ("seed", with_identity(seed=7), "0, now 7"),
        ("ema", with_identity(ema=0.9), "not given, now 0.9"),
        (
            "guidance",
            with_identity(guidance=[4.0, 2.5, "ugly"]),
            "`guidance.guidance_scale_2` was 3.0, now 2.5",
        ),
        (
            "optimizer",
            with_identity(optimizer={"type": "AdamW", "params": {"lr": 0.002, "eps": 1e-8}}),
            "`optimizer.params.lr` was 0.001, now 0.002",
        ),
        (
            "scheduler",
            with_identity(scheduler={"type": "WarmupLR"}),
            '`scheduler.type` was not given, now "WarmupLR"',
        ),
        ("student", with_run(student_config={"num_layers": 3}), "`student_config.num_layers` was 2, now 3"),
        ("student", SAVED, OTHERWISE["student"]),
        (
            "student",
            SAVED | {"facts": {"before": ["velocity: 4 steps"]}},
            'what it starts from was ["velocity: 3 steps"], now ["velocity: 4 steps"]',
        ),
        ("data", with_run(height=64), "`height` was 32, now 64"),
        ("data", SAVED, "other prompts, or names of media"),
        ("teacher", with_run(teacher_path="other"), '`teacher_path` was "wan", now "other"'),
        (
            "teacher",
            SAVED | {"files": {"teacher": FILES["teacher"] | {"transformer/a.safetensors": "9 z"}}},
            "not as they were: transformer/a.safetensors",
        ),
        ("teacher", {key: SAVED[key] for key in ("identity", "run")}, "its files are not as they were"),
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


def test_no_flag_is_told_where_one_difference_cannot_be_allowed(tmp_path: Path) -> None:
    problems = refused(tmp_path, [], student="1b", seed=7)
    assert len(problems) == 2 and not any("--allow_changed" in problem for problem in problems)
