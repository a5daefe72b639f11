"""The three figures above the report: how right, how small, how fast."""

from pathlib import Path
from typing import Any

import pytest
from ranks import write_json

from wandistiller.monitoring.headline import headline

LINES = [{"step": step, "loss": loss} for step, loss in enumerate([0.3, None, *[0.2] * 37, 0.1, 0.05], 1)]


def side(right: int, parameters: int, seconds: float) -> dict[str, Any]:
    score = {"count": right, "value": right / 64, "low": 0.0, "high": 1.0}
    return {"parameters": parameters, "seconds_per_sample": {"value": seconds}, "fully_right": score}


EVALUATED = {
    "prompts": 64,
    "steps": 40,
    "teacher": side(64, 28_000_000_000, 1.5),
    "student": side(63, 7_000_000_000, 0.6),
    "relative_velocity_error": {"all": {"value": 0.042, "low": 0.04, "high": 0.05}},
}


def test_an_evaluated_run_is_headed_by_shares_of_the_teacher_s_score_parameters_and_seconds(
    tmp_path: Path,
) -> None:
    write_json(tmp_path / "evaluation.json", EVALUATED)
    assert headline(tmp_path, tmp_path, LINES) == [
        ("98.4 %", "of the teacher's score", "prompts fully right: 63, teacher 64, of 64 prompts"),
        ("25 %", "of the teacher's parameters", "7 B, teacher 28 B"),
        ("40 %", "of the teacher's seconds", "0.6 s in 40 steps a sample, teacher 1.5 s in 40 steps"),
    ]


@pytest.mark.parametrize("right", [None, 0], ids=["no score", "a teacher that is never right"])
def test_without_a_share_of_a_score_the_velocity_error_stands_there(
    tmp_path: Path, right: int | None
) -> None:
    sides = {name: dict(EVALUATED[name]) for name in ("teacher", "student")}
    for name in sides:
        del sides[name]["fully_right"]
        if right is not None:
            sides[name]["fully_right"] = {"count": right, "value": float(right)}
    write_json(tmp_path / "evaluation.json", EVALUATED | sides)
    first = headline(tmp_path, tmp_path, LINES)[0]
    assert (first.value, first.label) == ("4.2 %", "velocity error") and "0 is the teacher" in first.detail


def test_a_run_without_evaluation_is_headed_by_its_loss_its_size_and_the_command_that_measures(
    tmp_path: Path,
) -> None:
    output = tmp_path / "my run"
    output.mkdir()
    write_json(output / "student_start.json", {"parameters": {"teacher": 6_690_176, "student": 2_551_232}})
    loss, small, fast = headline(output, output, LINES)
    assert loss == ("0.075", "loss, not evaluated", "mean of the last 2 steps; 0.25 in the first 2")
    assert small == ("38.1 %", "of the teacher's parameters", "2.55 M, teacher 6.69 M")
    assert fast.detail.endswith(f"wandistiller evaluate --student_path '{output / 'student'}'")
