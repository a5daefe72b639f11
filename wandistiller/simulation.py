"""Samples that the student draws while it trains."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from wandistiller.batch import Batch, GeneratedBatch
from wandistiller.flow import FewSteps, clean, path


@torch.no_grad()
def simulate(batch: GeneratedBatch, student: Callable[[Batch], Tensor], few: FewSteps) -> GeneratedBatch:
    """Sample from the batch's noise to the state before its drawn call, with the sampler of use.

    Source: backward simulation, Yin et al. 2024, arXiv:2405.14867, section 4.5.
    """
    state = batch
    for call in range(batch.exit):
        fresh_BCFHW = batch.fresh[call] if batch.fresh else None
        x_BCFHW = few.following(call, state.x_t_BCFHW, student(state), fresh_BCFHW)
        sigma_B = torch.full_like(batch.sigma_B, few.sigmas[call + 1])
        state = replace(state, x_t_BCFHW=x_BCFHW, sigma_B=sigma_B, expert=few.expert(call + 1))
    return state


def judged(batch: GeneratedBatch, v_BCFHW: Tensor) -> Batch:
    """Return the samples to which the student's velocity leads, noised to where they are judged."""
    at = batch.judged
    x0_BCFHW = clean(batch.x_t_BCFHW, v_BCFHW, batch.sigma_B)
    return replace(at, x0_BCFHW=x0_BCFHW, x_t_BCFHW=path(x0_BCFHW, at.noise_BCFHW, at.sigma_B))
