"""Samples that the student draws while it trains."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from wandistiller.batch import Batch, GeneratedBatch, JudgedBatch
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


def judged(batch: GeneratedBatch, v_BCFHW: Tensor) -> JudgedBatch:
    """Return the samples to which the student's velocity leads, noised to where they are judged.

    Samples x_s at a noise level s = `batch.end` above 0 are noised to t > s by the rest of the path:
    x_t = a x_s + b eps, a = (1 - t) / (1 - s), b^2 = t^2 - a^2 s^2, and so
    dx_t/dt = -x_s / (1 - s) + (t + (1 - t) s^2 / (1 - s)^2) eps / b.

    Source: phased distribution matching, Fan et al. 2025, arXiv:2510.27684.
    """
    at, s = batch.judged, batch.end
    noise_BCFHW, x0_BCFHW = at.noise_BCFHW, clean(batch.x_t_BCFHW, v_BCFHW, batch.sigma_B)
    if not s:
        x_t_BCFHW, target_BCFHW = path(x0_BCFHW, noise_BCFHW, at.sigma_B), noise_BCFHW - x0_BCFHW
    else:
        t_B1111, from_B1111 = (sigma_B.view(-1, 1, 1, 1, 1) for sigma_B in (at.sigma_B, batch.sigma_B))
        x_s_BCFHW = batch.x_t_BCFHW + (s - from_B1111) * v_BCFHW
        a_B1111 = (1 - t_B1111) / (1 - s)
        b_B1111 = (t_B1111**2 - (a_B1111 * s) ** 2).sqrt()
        x_t_BCFHW = a_B1111 * x_s_BCFHW + b_B1111 * noise_BCFHW
        growth_B1111 = (t_B1111 + a_B1111 * s**2 / (1 - s)) / b_B1111
        target_BCFHW = growth_B1111 * noise_BCFHW - x_s_BCFHW / (1 - s)
    return JudgedBatch(x0_BCFHW, noise_BCFHW, x_t_BCFHW, at.sigma_B, at.text_BLD, at.expert, target_BCFHW)
