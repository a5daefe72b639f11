"""Bands of sigma, and states in them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.batch import Batch, Conditioning
from wandistiller.experts import Expert, expert_at
from wandistiller.flow import with_noise
from wandistiller.utils.keyed_random import keyed_generator

EDGES = (0.0, 0.25, 0.5, 0.75, 0.875, 1.0)


@dataclass(frozen=True, slots=True)
class Band:
    """An interval of sigma in [0, 1] with one expert of the teacher and one of the student."""

    start: float
    end: float
    expert: Expert
    student_expert: Expert


def bands(teacher_boundary: float | None, student_boundary: float | None) -> list[Band]:
    edges = sorted({*EDGES, *(b for b in (teacher_boundary, student_boundary) if b is not None)})
    return [
        Band(a, b, expert_at(a, teacher_boundary), expert_at(a, student_boundary))
        for a, b in zip(edges, edges[1:], strict=False)
    ]


def states_in(
    band: Band, x0_BCFHW: Tensor, conditioning: Conditioning, keys: list[tuple[int | str, ...]]
) -> Batch:
    """Put clean latents on the path at a sigma in the band; noise and sigma are keyed, and by the band."""
    keys = [(*key, band.start) for key in keys]
    uniform = [torch.rand((), generator=keyed_generator("sigma", *key)).item() for key in keys]
    sigmas = [band.start + (band.end - band.start) * u for u in uniform]
    return with_noise(x0_BCFHW, conditioning, band.expert, sigmas, keys)
