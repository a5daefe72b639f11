"""A few cached samples, the same on every rank, on which a teacher is measured and a student compared with it."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from wandistiller import distributed
from wandistiller.batch import Batch, Expert
from wandistiller.data import CachedData
from wandistiller.job import Job
from wandistiller.noise import keyed_normal, path
from wandistiller.objectives import Teacher
from wandistiller.teacher import GuidedTeacher, LocalTeacher, OwnerTeacher

TOKENS, FEWEST, MOST = 2**15, 16, 64
"""Patches that the probes have together, and bounds for their number."""
BANDS = 4


def probes(job: Job, data: CachedData) -> list[Batch]:
    """Samples at evenly spaced places of the unshifted line, so with sigma spread as in training, each batch of one expert.

    As many as hold `TOKENS` patches, from `FEWEST` to `MOST`; `prepare_batch` of them in a batch.
    """
    count = min(MOST, max(FEWEST, TOKENS // job.folder.tokens(job.run.height, job.run.width, job.run.num_frames)))
    schedule = job.schedule
    sigmas = [schedule.shifted((i + 0.5) / count) for i in range(count)]
    high = [i for i in range(count) if schedule.boundary is None or sigmas[i] >= schedule.boundary]
    experts = {Expert.HIGH_NOISE: high, Expert.LOW_NOISE: [i for i in range(count) if i not in set(high)]}
    found = []
    for expert, numbers in experts.items():
        for first in range(0, len(numbers), job.run.prepare_batch):
            index_B = numbers[first : first + job.run.prepare_batch]
            x0_BCFHW, text_BLD = data.examples(index_B)
            noise = [keyed_normal(x0_BCFHW.shape[1:], job.run.seed, "probe", i) for i in index_B]
            noise_BCFHW = torch.stack(noise).to(x0_BCFHW.device)
            sigma_B = torch.tensor([sigmas[i] for i in index_B], device=x0_BCFHW.device)
            x_t_BCFHW = path(x0_BCFHW, noise_BCFHW, sigma_B)
            found.append(Batch(x0_BCFHW, noise_BCFHW, x_t_BCFHW, sigma_B, text_BLD, expert))
    return found


def unguided(teacher: Teacher) -> Teacher:
    """The teacher's text branch alone, which is what an unpruned copy answers; collective where the teacher is."""
    if isinstance(teacher, GuidedTeacher):
        return teacher.inner
    if isinstance(teacher, OwnerTeacher) and teacher.inner:
        return replace(teacher, inner=unguided(teacher.inner))
    return teacher


def networks(teacher: Teacher) -> dict[Expert, nn.Module]:
    """The modules of a teacher without guidance that are on this rank; none where another rank owns them."""
    if isinstance(teacher, OwnerTeacher):
        return networks(teacher.inner) if teacher.inner else {}
    return teacher.experts if isinstance(teacher, LocalTeacher) else {}


def holder(teacher: Teacher) -> int:
    """A rank that has the teacher's modules, the same on all ranks. Collective."""
    return distributed.from_rank_0(teacher.owner) if isinstance(teacher, OwnerTeacher) else 0


class VelocityError:
    """|v - v*|^2 and |v*|^2 by sample; the relative error is the root of their sums' quotient."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def add(self, batch: Batch, v_BCFHW: Tensor, target_BCFHW: Tensor) -> None:
        wrong_B, right_B = ((t.flatten(1).double().square().sum(1)) for t in (v_BCFHW - target_BCFHW, target_BCFHW))
        self._rows.append(torch.stack([batch.sigma_B.double(), wrong_B, right_B], dim=1).cpu())

    def relative(self, low: float = 0.0, high: float = 1.0) -> float | None:
        """Over the samples with sigma in (low, high]; None without any."""
        rows_N3 = torch.cat(self._rows)
        sums_3 = rows_N3[(rows_N3[:, 0] > low) & (rows_N3[:, 0] <= high)].sum(0)
        return (sums_3[1] / sums_3[2]).sqrt().item() if sums_3[0] else None

    def by_sigma(self) -> dict[str, float]:
        """By equal bands of sigma, those with samples."""
        edges = [i / BANDS for i in range(BANDS + 1)]
        found = {f"{low}-{high}": self.relative(low, high) for low, high in zip(edges, edges[1:], strict=False)}
        return {band: error for band, error in found.items() if error is not None}


@torch.no_grad()
def velocity_error(batches: list[Batch], teacher: Teacher, velocity: Callable[[Batch], Tensor]) -> VelocityError:
    """How far the velocities v_BCFHW that `velocity` gives are from the teacher's. Collective where either is."""
    error = VelocityError()
    for batch in batches:
        error.add(batch, velocity(batch), teacher.velocity(batch))
    return error
