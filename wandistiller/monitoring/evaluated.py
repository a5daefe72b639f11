"""The contents of evaluation.json, which `evaluate` writes and a run's report reads."""

from typing import TypedDict


class Estimated(TypedDict, total=False):
    """A value with the ends of its 95 % confidence interval; None where it is not finite."""

    value: float | None
    low: float | None
    high: float | None
    count: int
    """Of a share: the hits."""


Figures = dict[str, Estimated]
"""Score or time -> its estimate."""


class VelocityError(TypedDict):
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
    relative_velocity_error: VelocityError
    teacher_weights: str
    """Format of a quantised teacher."""
    teacher_weights_velocity_error: dict[str, dict[str, float]]
    frechet: dict[str, dict[str, int | Estimated]]
    """By kind of feature: `features`, their number, and the distances."""
    by_steps: dict[str, dict[str, Figures]]
    """By side, then by the number of steps."""
