"""Error of a quantised teacher's velocities against those of its unquantised weights, by band of sigma."""

from collections.abc import Iterable

import torch
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.distributed import collectives
from wandistiller.evaluation.sigma_bands import bands, states_in
from wandistiller.flow import band_name
from wandistiller.teacher.base import Guidance, OwnerTeacher, Teacher
from wandistiller.teacher.build import unquantized_teacher
from wandistiller.teacher.placements.base import Placement
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.logging import set_activity
from wandistiller.wan.pipeline import WanFolder

SAMPLES = 2
"""Samples in each band, the shortest: for fewer calls of the teacher than an update makes."""


def quantization_error(
    folder: WanFolder,
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
    states = states_by_band(folder, x0_BCFHW, conditioning, seed)
    quantized = teacher.inner if isinstance(teacher, OwnerTeacher) else teacher
    velocities, faults = [], []
    if quantized:
        exact, readers = unquantized_teacher(folder, placement, guidance, merges_padding=merges_padding)
        targets, found = (one.predict_all([*states.values()], ()) for one in (exact, quantized))
        velocities = [(p.v_BCFHW, t.v_BCFHW) for p, t in zip(found, targets, strict=True)]
        faults = [p for reader in readers for p in reader.faults]
    return relative_errors(states, velocities, faults)


def states_by_band(
    folder: WanFolder, x0_BCFHW: Tensor, conditioning: Conditioning, seed: int
) -> dict[str, State]:
    """Return the states at which errors are measured, by the name of each band that the pipeline serves."""
    frames = folder.shortest_latent
    x0_BCFHW = x0_BCFHW[:SAMPLES, :, :frames]
    conditioning = conditioning.map(lambda t: t[:SAMPLES]).shortened(frames)
    keys = [(seed, "quantised", i) for i in range(len(x0_BCFHW))]
    served = [band for band in bands(folder.boundary, None) if band.expert in folder.configs]
    return {band_name(b.start, b.end): states_in(b, x0_BCFHW, conditioning, keys) for b in served}


def relative_errors(
    names: Iterable[str], velocities: list[tuple[Tensor, Tensor]], faults: list[str]
) -> dict[str, float]:
    """Return sum |v - v*|² / sum |v*|² over the ranks that have computed them, by band. Collective.

    Args:
        names: of the bands.
        velocities: v and v* in each; none on a rank that does not compute.
        faults: in the weights that this rank has read.
    Raises:
        ConfigError: on every rank, if there are faults on any.
    """
    sums = [[t.double().square().sum().item() for t in (v - target, target)] for v, target in velocities]
    if problems := collectives.gather_problems(faults):
        raise ConfigError(*problems)
    of_ranks = [torch.tensor(one) for one in collectives.gather_objects(sums) if one]
    error_N, target_N = sum(of_ranks).T.tolist()
    return {name: error / target for name, error, target in zip(names, error_N, target_N, strict=True)}


def in_words(errors: dict[str, float]) -> str:
    return ", ".join(f"{error:.2g} at {band}" for band, error in errors.items())
