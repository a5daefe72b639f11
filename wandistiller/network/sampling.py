"""The denoising loop with diffusers' scheduler, and its noise levels."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from diffusers import FlowMapEulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, SchedulerMixin
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.distributed import collectives
from wandistiller.experts import expert_at
from wandistiller.flow import EULER, FLOW_MAP, RENOISE, TRAIN_TIMESTEPS, FewSteps
from wandistiller.network.folder import Folder
from wandistiller.utils.logging import heartbeat

AT_BOUNDARY = 0.003
"""A noise level as near to the boundary belongs to the low-noise expert: rounding moves levels by 0.002."""


def few_step_config(shift: float, steps: int, sampler: str = EULER) -> dict[str, Any]:
    """Return the scheduler_config.json with which stock diffusers samples in few steps as they are trained.

    diffusers 0.42.1 lays its levels evenly from 1 to 1/1000 before it shifts them. A shift of
    s n / (s + n - 1), and the levels stretched to end with s / (s + n - 1), make them those of
    `FlowSchedule.steps`, sigma_k = shifted(1 - k/n), within 0.002. RENOISE takes torch's global generator.
    FLOW_MAP's scheduler has these levels itself, of any number of steps.
    """
    if sampler == FLOW_MAP:
        name = FlowMapEulerDiscreteScheduler.__name__
        return {"_class_name": name, "num_train_timesteps": int(TRAIN_TIMESTEPS), "shift": shift}
    last = shift / (shift + steps - 1)
    config = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": int(TRAIN_TIMESTEPS),
        "shift": steps * last,
    }
    config |= {"stochastic_sampling": True} if sampler == RENOISE else {}
    return config | ({"shift_terminal": last} if steps > 1 else {})  # one level cannot be stretched


@cache
def few_steps(shift: float, steps: int, boundary: float | None, sampler: str = EULER) -> FewSteps:
    """Return the levels that `few_step_config` gives, split at the `boundary` of a two-expert student."""
    sigmas = few_step_scheduler(shift, steps, sampler).sigmas.tolist()[:-1]
    if boundary is not None:
        high = [sigma for sigma in sigmas if sigma > boundary + AT_BOUNDARY]
        if len(high) < steps:  # in the middle, as the pipeline rounds timesteps
            boundary = (high[-1] + sigmas[len(high)]) / 2
    return FewSteps(tuple(sigmas), boundary, sampler)


def few_step_scheduler(shift: float, steps: int, sampler: str = EULER) -> SchedulerMixin:
    kind = FlowMapEulerDiscreteScheduler if sampler == FLOW_MAP else FlowMatchEulerDiscreteScheduler
    scheduler = kind.from_config(few_step_config(shift, steps, sampler))
    scheduler.set_timesteps(steps)
    return scheduler


def path_sigmas(folder: Folder, shift: float, steps: int) -> list[float]:
    """Return sigma of a rollout's states, falling from about 1 to 0: before each of its steps, then of x0."""
    scheduler = folder.scheduler(shift)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.tolist()


def denoise(
    velocity: Callable[[State], Tensor],
    folder: Folder,
    shift: float,
    noise_BCFHW: Tensor,
    conditioning: Conditioning,
    steps: int,
    few: FewSteps | None = None,
    new_noise: Callable[[int], Tensor] | None = None,
    *,
    level_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    """Sample with the pipeline's scheduler, or as a student of few steps. Collective.

    Args:
        velocity: v_BCFHW of a teacher or student.
        noise_BCFHW: the starting point, standard normal.
        few: the sampler of a few-step student, in place of `steps` of the pipeline's.
        new_noise: new noise_BCFHW after a call, counted from 0, for a sampler that takes it.
        level_dtype: of the noise levels that networks are given; float64 for diffusers' timesteps to the bit.

    Returns:
        x0_BCFHW, and the path to it: (sigma, x_t_BCFHW) before each step.

    Raises:
        Stopped: on all ranks, between two calls of the network, if any of them received a request to stop.
    """
    x_t_BCFHW, states = conditioning.with_given(noise_BCFHW), []

    def predict(sigma: float, end: float, boundary: float | None) -> Tensor:
        collectives.raise_if_stop_requested()  # one call for a video may take minutes
        heartbeat()
        sigma_B = torch.full((len(noise_BCFHW),), sigma, device=noise_BCFHW.device, dtype=level_dtype)
        state = State(
            x_t_BCFHW=x_t_BCFHW,
            sigma_B=sigma_B,
            end_B=torch.full_like(sigma_B, end),
            conditioning=conditioning,
            expert=expert_at(sigma, boundary),
        )
        with torch.no_grad():
            return velocity(state)

    if few:
        for call, sigma in enumerate(few.sigmas):
            states.append((sigma, x_t_BCFHW))
            last = call + 1 == len(few.sigmas)
            new = new_noise(call) if few.sampler == RENOISE and not last else noise_BCFHW
            new = conditioning.with_given(new)
            x_t_BCFHW = few.following(call, x_t_BCFHW, predict(*few.ends(call), few.boundary), new)
        return conditioning.with_given(x_t_BCFHW), states
    scheduler = folder.scheduler(shift)
    scheduler.set_timesteps(steps, device=noise_BCFHW.device)
    # UniPC calls the network at whole timesteps but steps between the sigmas themselves (diffusers 0.42.1)
    sigmas = scheduler.sigmas.tolist()
    for t, exact, end in zip(scheduler.timesteps, sigmas, [*sigmas[1:], 0.0], strict=False):
        states.append((exact, x_t_BCFHW))
        v_BCFHW = predict(t.item() / TRAIN_TIMESTEPS, end, folder.boundary)
        x_t_BCFHW = scheduler.step(v_BCFHW, t, x_t_BCFHW, return_dict=False)[0]
    return conditioning.with_given(x_t_BCFHW), states
