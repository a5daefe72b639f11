"""The experts of a Wan, and which of them serves a noise level."""

from enum import Enum


class Expert(Enum):
    """One of the teacher's denoisers; the value is its folder in a diffusers pipeline."""

    HIGH_NOISE = "transformer"  # sigma >= boundary; the only expert of Wan2.1 and of Wan2.2 5B
    LOW_NOISE = "transformer_2"


def expert_at(sigma: float, boundary: float | None) -> Expert:
    """Return the expert for `sigma` (diffusers: timestep >= 1000 boundary_ratio); None: there is only one."""
    return Expert.HIGH_NOISE if boundary is None or sigma >= boundary else Expert.LOW_NOISE
