"""The student's own samples: what they begin with, how far they go, and where they are compared."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from wandistiller.batch import State, to_device
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import FLOW_MAP, RENOISE, FewSteps, FlowSchedule, clean, path
from wandistiller.utils.keyed_random import keyed_normal

RENOISED = (0.02, 0.98)
"""Noise levels at which a student's samples are compared; nearer to 0 and 1 scores say little."""
WITH_NOISE, ON_PATH, MIXED = "noise", "path", "mixed"
"""Where a student's samples are compared: with new noise, on its own Euler step, or half of them on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout(State):
    """A state of the student's sampling from pure noise, at first the noise itself."""

    exit: int
    """Calls of the student before the one that learns; equal on all ranks for one micro-step."""
    few: FewSteps
    """The sampler of use."""
    renoise: State
    """Noise for the samples, its level, where they are compared, and the teacher's expert for it."""
    on_path_B: Tensor
    """True for samples that are compared on the student's own Euler step, without the noise of `renoise`."""
    new_noise: tuple[Tensor, ...] = ()
    """Noise for the state after each call, for a sampler that takes new noise."""
    end: float = 0.0
    """Noise level to which the samples lead: 0, or an expert's hand-over to the next."""
    call: int = 0
    """Calls that were made."""

    def at(self, call: int, x_BCFHW: Tensor) -> "Rollout":
        """Return the state before a call, counted from 0."""
        sigma_B = torch.full_like(self.sigma_B, self.few.sigmas[call])
        levels = {"sigma_B": sigma_B, "end_B": _end(self.few, call, sigma_B)}
        return replace(self, x_t_BCFHW=x_BCFHW, expert=self.few.expert(call), call=call, **levels)

    def following(self, v_BCFHW: Tensor) -> "Rollout":
        """Return the state after a call with its velocity, by the sampler of use."""
        new_BCFHW = self.new_noise[self.call] if self.new_noise else None
        x_BCFHW = self.few.following(self.call, self.x_t_BCFHW, v_BCFHW, new_BCFHW)
        return self.at(self.call + 1, x_BCFHW)


class Turn(NamedTuple):
    """Place of an update in roll-outs that go on from one update to the next."""

    exit: int
    """Calls of the student before the one that learns."""
    begun: int
    """The update in which they began, and whose prompts they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renoised(State):
    """Samples of the student's at a noise level."""

    x0_BCFHW: Tensor
    """Its prediction of clean latents."""
    target_BCFHW: Tensor
    """The velocity dx_t/dt of the path to those samples, which the critic learns."""


def drawn(
    source: MicroBatches,
    update: int,
    micro: int,
    compare: str = WITH_NOISE,
    turn: Turn | None = None,
    guidance_share: float = 1.0,
) -> Rollout:
    """Draw the noise that the student samples from, its calls, and where its samples are compared.

    Args:
        compare: WITH_NOISE, ON_PATH or MIXED.
        turn: of roll-outs that go on from update to update; None: they begin in this one, and end anywhere.
        guidance_share: samples that the teacher predicts with guidance, which counts so much more for them.
    """
    schedule, index_B = source.schedule, source.indices(update, micro)
    few, exit_ = (schedule.few, turn.exit) if turn else schedule.jumps(update)
    schedule, begun = replace(schedule, few=few), turn.begun if turn else update
    conditioning = source.conditioning(begun, micro)
    end = schedule.handover if schedule.trained is Expert.HIGH_NOISE else 0.0
    renewed = exit_ + bool(turn) if few.sampler == RENOISE else 0  # those that go on are noised once more
    # the names are part of the random numbers' keys
    kinds = ("start", begun), ("judged noise", update), *((f"fresh {call}", begun) for call in range(renewed))
    start_BCFHW, noise_BCFHW, *new_noise = (
        torch.stack(
            [keyed_normal(source.latent, schedule.seed, *key, i) for i in source.indices(key[1], micro)]
        )
        for key in kinds
    )
    expert = schedule.draw_expert(update, None if compare == WITH_NOISE else exit_)
    least, most = RENOISED
    sigmas, on_path = [], [_is_on_path(compare, schedule, i) for i in index_B]
    for i, is_on_path in zip(index_B, on_path, strict=True):
        sigma = schedule.draw_sigma(expert, update, i, exit_ if is_on_path else None)
        sigmas.append(min(max(sigma, least if is_on_path else end + least), most))
    sigma_B = to_device(torch.tensor(sigmas, dtype=torch.float32), device := conditioning.text_BLD.device)
    start_BCFHW, noise_BCFHW, *new_noise = (
        conditioning.with_given(to_device(t, device)) for t in (start_BCFHW, noise_BCFHW, *new_noise)
    )
    guided = _guided(schedule, update, index_B, guidance_share)
    guided_B = to_device(torch.tensor(guided), device) if guidance_share < 1 else None
    return Rollout(
        x_t_BCFHW=start_BCFHW,
        sigma_B=torch.ones_like(sigma_B),
        end_B=_end(few, 0, sigma_B),
        conditioning=conditioning,
        expert=few.expert(0),
        exit=exit_,
        few=few,
        renoise=State(
            x_t_BCFHW=noise_BCFHW,
            sigma_B=sigma_B,
            conditioning=conditioning,
            expert=expert,
            guided_B=guided_B,
        ),
        new_noise=tuple(new_noise),
        end=end,
        on_path_B=to_device(torch.tensor(on_path), device),
    )


def _end(few: FewSteps, call: int, sigma_B: Tensor) -> Tensor | None:
    """Return the noise level to which a call of a flow map leads; None of others, which are not told."""
    return torch.full_like(sigma_B, few.ends(call)[1]) if few.sampler == FLOW_MAP else None


def _is_on_path(compare: str, schedule: FlowSchedule, sample_index: int) -> bool:
    """Return whether a sample is compared on the path; of MIXED one of two with consecutive indices."""
    if compare == MIXED:  # drawn for each pair: the indices of all of the student's updates may be odd
        return (sample_index + int(2 * schedule.uniform("compared", sample_index // 2))) % 2 == 0
    return compare == ON_PATH


def _guided(schedule: FlowSchedule, update: int, index_B: list[int], share: float) -> list[float]:
    """Return 1 / share for a share of an update's samples, which are evenly spread, and 0 for the others."""
    phase = schedule.uniform("guided", update)
    return [1 / share if (phase + i * share) % 1 < share else 0.0 for i in index_B]


def renoised(batch: Rollout, v_BCFHW: Tensor) -> Renoised:
    """Return the samples to which the student's velocity leads, noised to where they are compared.

    Samples x_s at a noise level s = `batch.end` above 0 are noised to t > s by the rest of the path:
    x_t = a x_s + b eps, a = (1 - t) / (1 - s), b^2 = t^2 - a^2 s^2, and so
    dx_t/dt = -x_s / (1 - s) + (t + (1 - t) s^2 / (1 - s)^2) eps / b.

    Those on the path, the line from x_k along the student's velocity v, need no noise: x_t = x_k + (t - k) v.

    Sources: phased distribution matching, Fan et al. 2025, arXiv:2510.27684; on the path, Wang et al. 2026,
    arXiv:2609.35768.
    """
    at, s = batch.renoise, batch.end
    noise_BCFHW, x0_BCFHW = at.x_t_BCFHW, clean(batch.x_t_BCFHW, v_BCFHW, batch.sigma_B)
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
    on_path_B1111 = batch.on_path_B.view(-1, 1, 1, 1, 1)
    on_path_BCFHW = clean(batch.x_t_BCFHW, v_BCFHW, batch.sigma_B - at.sigma_B)
    x_t_BCFHW = torch.where(on_path_B1111, on_path_BCFHW, x_t_BCFHW)
    target_BCFHW = torch.where(on_path_B1111, v_BCFHW, target_BCFHW)
    return Renoised(
        x_t_BCFHW=x_t_BCFHW,
        sigma_B=at.sigma_B,
        conditioning=at.conditioning,
        expert=at.expert,
        guided_B=at.guided_B,
        x0_BCFHW=x0_BCFHW,
        target_BCFHW=target_BCFHW,
    )
