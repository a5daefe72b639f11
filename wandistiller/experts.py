"""The experts of a Wan, and which of them serves a noise level."""

from enum import Enum
from typing import Self


class Expert(Enum):
    """One of the teacher's denoisers; the value is its folder in a diffusers pipeline."""

    HIGH_NOISE = "transformer"  # sigma >= boundary; the only expert of Wan2.1 and of Wan2.2 5B
    LOW_NOISE = "transformer_2"

    @property
    def key(self) -> str:
        """Its name in recipes and flags, such as high_noise."""
        return self.name.lower()

    @property
    def in_words(self) -> str:
        """Its name in messages, such as high-noise expert."""
        return f"{self.key.replace('_', '-')} expert"

    @classmethod
    def of_key(cls, key: str | None) -> Self | None:
        """Return the expert with this name in recipes; None where none is named."""
        return cls[key.upper()] if key else None


def expert_at(sigma: float, boundary: float | None) -> Expert:
    """Return the expert for `sigma` (diffusers: timestep >= 1000 boundary_ratio); None: there is only one."""
    return Expert.HIGH_NOISE if boundary is None or sigma >= boundary else Expert.LOW_NOISE
