"""Error of a quantised teacher's velocities against those of its unquantised weights, by band of sigma."""

import torch
from torch import Tensor

from wandistiller.batch import Conditioning
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
        placement: the teacher's.
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
    squares_N2, faults = None, []
    if quantized:
        merges = {"merges_padding": merges_padding}
        exact, readers = unquantized_teacher(folder, placement, guidance, **merges)
        targets, found = exact.predict_all(states, ()), quantized.predict_all(states, ())
        pairs = [(p.v_BCFHW - t.v_BCFHW, t.v_BCFHW) for p, t in zip(found, targets, strict=True)]
        sums = [[t_BCFHW.double().square().sum() for t_BCFHW in pair] for pair in pairs]
        squares_N2, faults = torch.tensor(sums), [p for reader in readers for p in reader.faults]
    if problems := collectives.gather_problems(faults):
        raise ConfigError(*problems)
    of_ranks = [squares for squares in collectives.gather_objects(squares_N2) if squares is not None]
    error_N, target_N = sum(of_ranks).T.tolist()
    named = zip(served, error_N, target_N, strict=True)
    return {band_name(b.start, b.end): error / target for b, error, target in named}


def in_words(errors: dict[str, float]) -> str:
    """Return the errors in one line."""
    return ", ".join(f"{error:.2g} at {band}" for band, error in errors.items())
