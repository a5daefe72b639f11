"""The denoising loop with diffusers' scheduler, and its noise levels."""

from collections.abc import Callable

import torch
from diffusers import SchedulerMixin
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.flow import TRAIN_TIMESTEPS, expert_at
from wandistiller.utils.files import read_json
from wandistiller.wan.known import scheduler_class
from wandistiller.wan.pipeline import WanFolder


def _scheduler(
    folder: WanFolder, shift: float, steps: int, device: torch.device | None = None
) -> SchedulerMixin:
    """The pipeline's own scheduler, set to `steps`."""
    config = read_json(folder.path / "scheduler" / "scheduler_config.json")
    key = "shift" if "shift" in config else "flow_shift"
    scheduler = scheduler_class(config["_class_name"]).from_config(config, **{key: shift})
    scheduler.set_timesteps(steps, device=device)
    return scheduler


def path_sigmas(folder: WanFolder, shift: float, steps: int) -> list[float]:
    """Return sigma of a rollout's states, falling from about 1 to 0: before each of its steps, then of x0."""
    return _scheduler(folder, shift, steps).sigmas.tolist()


def denoise(
    velocity: Callable[[Batch], Tensor],
    folder: WanFolder,
    shift: float,
    noise_BCFHW: Tensor,
    text_BLD: Tensor,
    steps: int,
) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    """Sample with the pipeline's own scheduler. All ranks must call it with the same number of steps.

    Args:
        velocity: v_BCFHW of a teacher or student.
        noise_BCFHW: the starting point, standard normal.
    Returns:
        x0_BCFHW, and the path to it: (sigma, x_t_BCFHW) before each step.
    """
    scheduler = _scheduler(folder, shift, steps, noise_BCFHW.device)
    x_t_BCFHW, states = noise_BCFHW, []
    # UniPC calls the network at whole timesteps but steps between the sigmas themselves (diffusers 0.42.1)
    for t, exact in zip(scheduler.timesteps, scheduler.sigmas.tolist(), strict=False):
        sigma = t.item() / TRAIN_TIMESTEPS
        sigma_B = torch.full((len(noise_BCFHW),), sigma, device=noise_BCFHW.device)
        states.append((exact, x_t_BCFHW))
        batch = Batch(x_t_BCFHW, noise_BCFHW, x_t_BCFHW, sigma_B, text_BLD, expert_at(sigma, folder.boundary))
        with torch.no_grad():
            x_t_BCFHW = scheduler.step(velocity(batch), t, x_t_BCFHW, return_dict=False)[0]
    return x_t_BCFHW, states
