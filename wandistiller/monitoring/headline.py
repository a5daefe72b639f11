"""The figures of evaluation.json, and the three above a run's report: how right, how small and how fast."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypedDict

from wandistiller.monitoring.metrics import MetricsLine
from wandistiller.utils.files import read_json


class Estimated(TypedDict, total=False):
    """A value with the ends of its 95 % confidence interval; None where it is not finite."""

    value: float | None
    low: float | None
    high: float | None
    count: int
    """Of a share: the hits."""


Figures = dict[str, Estimated]
"""Score or time -> its estimate."""


class VelocityErrors(TypedDict):
    """Squared error of the student's velocities over the squared velocities of its teacher."""

    bands: Figures
    """By band of sigma; each names its `expert` too."""
    experts: Figures
    all: Estimated


class Evaluated(TypedDict, total=False):
    """Figures of teacher and student, and what they were drawn with."""

    prompts: int
    steps: int
    teacher_steps: int
    shift: float
    """Of the noise levels that the student was trained at; the teacher draws at that too."""
    teacher_shift: float
    seed: int
    trained_steps: int
    """Training steps of the student, if it is one of this package."""
    teacher: dict[str, int | Estimated | dict[str, float]]
    """`parameters`, `peak_memory_gib` by place, and Figures."""
    student: dict[str, int | Estimated | dict[str, float]]
    ratio: Figures
    """Student over teacher, paired by prompt or batch."""
    relative_velocity_error: VelocityErrors
    teacher_weights: str
    """Format of a quantised teacher."""
    frechet: dict[str, dict[str, int | Estimated]]
    """By kind of feature: `features`, their number, and the distances."""
    by_steps: dict[str, dict[str, Figures]]
    """By side, then by the number of steps."""


SCORES = {"fully_right": "prompts fully right", "pickscore": "PickScore", "clip_score": "CLIP score"}
"""Scores of evaluation.json, the one that says most first, and their names for people."""
SHARE_OF_LOSS = 20
"""The first and the last of so many equal parts of the losses are compared."""
SIDES = ("student", "teacher")


class Figure(NamedTuple):
    """A figure, what it is of, and the numbers that it comes from."""

    value: str
    label: str
    detail: str


def headline(output: Path, run: Path, lines: Sequence[MetricsLine]) -> list[Figure]:
    """Return the student's score, parameters and seconds as shares of the teacher's.

    What was not evaluated is replaced by what the run knows: its loss, and the command that measures.

    Args:
        run: the output itself, or the folder of its last stage.
        lines: of that one's metrics.jsonl.
    """
    evaluated = read_if_exists(output / "evaluation.json")
    known = evaluated or {
        side: {"parameters": number}
        for side, number in read_if_exists(run / "student_start.json").get("parameters", {}).items()
    }
    right = _score(evaluated) or _error(evaluated)
    if right and (older := outdated(evaluated, lines)):
        right = right._replace(label=f"{right.label}, {older}")
    command = f"wandistiller evaluate --student_path {shlex.quote(str(output / 'student'))}"
    later = Figure("?", "No evaluation yet", f"when the run is done: {command}")
    small = []
    if both := _sides(known, "parameters"):
        unit, scale = ("B", 1e9) if both[1] >= 1e9 else ("M", 1e6)
        detail = f"{both[0] / scale:.3g} {unit}, teacher {both[1] / scale:.3g} {unit}"
        small = [Figure(_percent(both[0] / both[1]), "of the teacher's parameters", detail)]
    return [right or _loss(lines), *small, _seconds(evaluated) or later]


def outdated(evaluated: Evaluated, lines: Sequence[MetricsLine]) -> str:
    """Say after how many steps the student was evaluated, if the run has another number of them by now."""
    steps, done = evaluated.get("trained_steps"), lines[-1]["step"]
    return f"after {steps} of {done} steps" if steps and steps != done else ""


def read_if_exists(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _value(side: Mapping[str, object], key: str) -> float | None:
    """Return a figure, whether it is a number or an estimate."""
    figure = side.get(key)
    return figure.get("value") if isinstance(figure, dict) else figure


def _sides(known: Evaluated, key: str) -> tuple[float, float] | None:
    """Return a figure of student and teacher; None if either lacks it, or the teacher's is 0."""
    student, teacher = (_value(known.get(side, {}), key) for side in SIDES)
    return (student, teacher) if student is not None and teacher else None


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _score(evaluated: Evaluated) -> Figure | None:
    for key, name in SCORES.items():
        if both := _sides(evaluated, key):
            sides = zip((evaluated[side][key] for side in SIDES), both, strict=True)
            its, theirs = (figure.get("count", f"{value:.3g}") for figure, value in sides)
            detail = f"{name}: {its}, teacher {theirs}, of {evaluated['prompts']} prompts"
            return Figure(_percent(both[0] / both[1]), "of the teacher's score", detail)
    return None


def _error(evaluated: Evaluated) -> Figure | None:
    error = _value(evaluated.get("relative_velocity_error", {}), "all")
    detail = "squared, over the teacher's squared: 0 is the teacher, 100 % an output of zeros"
    return None if error is None else Figure(_percent(error), "velocity error", detail)


def _loss(lines: Sequence[MetricsLine]) -> Figure:
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    part = -(-len(losses) // SHARE_OF_LOSS)
    if not losses:
        return Figure("not finite", "loss", "in every step")
    first, last = mean(losses[:part]), mean(losses[-part:])
    steps = f"mean of the last {part} steps; {first:.3g} in the first {part}"
    detail = steps if part > 1 else f"last step; {first:.3g} in the first"
    return Figure(f"{last:.3g}", "loss, not evaluated", detail)


def _seconds(evaluated: Evaluated) -> Figure | None:
    if not (both := _sides(evaluated, "seconds_per_sample")):
        return None
    # .get: files of versions without students of few steps have one number for both
    steps = evaluated["steps"], evaluated.get("teacher_steps", evaluated["steps"])
    student, teacher = (f"{seconds:.3g} s in {n} steps" for seconds, n in zip(both, steps, strict=True))
    detail = f"{student} a sample, teacher {teacher}"
    return Figure(_percent(both[0] / both[1]), "of the teacher's seconds", detail)
