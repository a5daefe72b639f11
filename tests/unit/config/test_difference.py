"""A run that does not go on from a checkpoint is told in words what was other."""

from typing import Any

import pytest

from wandistiller.checkpoint.difference import OTHERWISE, in_words

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
