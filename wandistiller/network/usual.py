"""A teacher's usual sampling settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usual:
    """A teacher's usual sampling settings, the defaults of a run."""

    height: int
    width: int
    guidance: tuple[float, float]
    """Scales of high-noise and low-noise expert."""
