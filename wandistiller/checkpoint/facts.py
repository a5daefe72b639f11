"""The origin of a student and how it samples, as its checkpoints and exports store it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a run for its export, `facts` in every checkpoint; defaults are for files without the key."""

    teacher_path: str = ""
    teacher_revision: str | None = None
    transformer: dict[str, Any] = field(default_factory=dict)
    """The student's full config."""
    init: str | None = None
    """`teacher`, a pipeline's folder, or the name of the run that it starts from."""
    keep_layers: str | list[int] | None = None
    shift: float | None = None
    experts: list[str] = field(default_factory=list)
    """Folder names of the student's networks."""
    boundary: float | None = None
    """Noise level at which the experts change."""
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    steps: int | None = None
    few_steps: list[float] | None = None
    """The noise levels of a few-step student."""
    sampler: str | None = None
    """That of a few-step student."""
    teacher_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    negative_prompt: str | None = None
    objective: str | None = None
    max_steps: int | None = None
    before: list[str] | None = None
    """Objective and steps of the runs before this one; it and what follows are stored only if set."""
    teacher_weights: str | None = None
    """Format of the teacher's quantised weights."""
    ema: float | None = None
    ema_start: int | None = None
    learning_rates: dict[str, float] | None = None
    frozen: list[str] | None = None
    lora: dict[str, Any] | None = None
    averaged: bool | None = None
    """True if an export has the average of the weights."""

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> "Facts":
        """Take the facts of a checkpoint or an export; keys of other versions are left out."""
        return cls(**{f.name: stored[f.name] for f in fields(cls) if f.name in stored})

    def as_json(self) -> dict[str, Any]:
        """Return the facts as they are stored."""
        names = [f.name for f in fields(self)]
        always = names[: names.index("before")]
        return {key: value for key, value in vars(self).items() if key in always or value is not None}

    @property
    def has_boundary(self) -> bool:
        """True if two experts share the noise levels."""
        return len(self.experts) == 2 and self.boundary is not None
