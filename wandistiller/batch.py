"""One micro-step's samples, and the legend for every tensor name in this package.

B sample on this rank, C latent channel, F latent frame, H W latent pixel, L text token (512), D text width.
The order is always BCFHW, which is diffusers' own; it is never permuted.
sigma is in [0, 1] and 1 is pure noise; x_t = (1 - sigma) x0 + sigma noise; v = noise - x0; model time t = 1000 sigma.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor


class Expert(Enum):
    """One of the teacher's denoisers; the value is its folder in a diffusers pipeline."""

    HIGH_NOISE = "transformer"  # sigma >= boundary; the only expert of Wan2.1 and of Wan2.2 5B
    LOW_NOISE = "transformer_2"


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples at one point of the path from data to noise."""

    x0_BCFHW: Tensor
    noise_BCFHW: Tensor
    x_t_BCFHW: Tensor
    sigma_B: Tensor
    """float32, in [0, 1]."""
    text_BLD: Tensor
    """Zero-padded to L tokens: Wan takes no text mask, so the padding is part of the input."""
    expert: Expert
    """Equal on all ranks for one micro-step."""

    def at(self, **changes: Tensor | Expert) -> "Batch":
        """The same samples with some fields changed, for example at another point of the path."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a network says of a batch."""

    v_BCFHW: Tensor
    """float32."""
    features: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states h_BSD after the blocks of these numbers, in the teacher's width."""
