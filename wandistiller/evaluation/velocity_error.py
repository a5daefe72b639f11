"""Bands of sigma, states in them, and the error of a quantised teacher's velocities there."""

from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.batch import Batch, Conditioning
from wandistiller.distributed import collectives
from wandistiller.experts import Expert, expert_at
from wandistiller.flow import band_name, with_noise
from wandistiller.network.folder import Folder
from wandistiller.teacher.base import Guidance, OwnerTeacher, Teacher
from wandistiller.teacher.build import unquantized_teacher
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_generator
from wandistiller.utils.logging import set_activity

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


SAMPLES = 2
"""Samples in each band, the shortest: for fewer calls of the teacher than an update makes."""


def quantization_error(
    folder: Folder,
    placement: Placement,
    teacher: Teacher,
    guidance: Guidance,
    x0_BCFHW: Tensor,
    conditioning: Conditioning,
    seed: int,
    *,
    merges_padding: bool = False,
) -> dict[str, float]:
    """Return sum |v - v*|² / sum |v*|² by the name of each band, v* with unquantised weights. Collective.

    Ranks that compute read all weights once more, one block at a time.

    Args:
        x0_BCFHW: clean latents, of which the first frames are noised; all on the ranks' devices.
    Raises:
        ConfigError: on every rank, if weights could not be read on any.
    """
    set_activity("measuring the quantised teacher")
    frames = folder.shortest_latent
    x0_BCFHW = x0_BCFHW[:SAMPLES, :, :frames]
    conditioning = conditioning.map(lambda t: t[:SAMPLES]).shortened(frames)
    keys = [(seed, "quantised", i) for i in range(len(x0_BCFHW))]
    served = [band for band in bands(folder.boundary, None) if band.expert in folder.configs]
    states = [states_in(band, x0_BCFHW, conditioning, keys) for band in served]
    quantized = teacher.inner if isinstance(teacher, OwnerTeacher) else teacher
    sums, faults = [], []
    if quantized:
        exact, readers = unquantized_teacher(folder, placement, guidance, merges_padding=merges_padding)
        predictions = (network.predict_all(states, ()) for network in (exact, quantized))
        for target, prediction in zip(*predictions, strict=True):
            both = prediction.v_BCFHW - target.v_BCFHW, target.v_BCFHW
            sums.append([v_BCFHW.double().square().sum().item() for v_BCFHW in both])
        faults = [p for reader in readers for p in reader.faults]
    if problems := collectives.gather_problems(faults):
        raise ConfigError(*problems)
    of_ranks = [torch.tensor(of_rank) for of_rank in collectives.gather_objects(sums) if of_rank]
    error_N, target_N = sum(of_ranks).T.tolist()
    names = [band_name(band.start, band.end) for band in served]
    return {name: error / target for name, error, target in zip(names, error_N, target_N, strict=True)}


def in_words(errors: dict[str, float]) -> str:
    return ", ".join(f"{error:.2g} at {band}" for band, error in errors.items())
