"""Samples of dmd2 without data, velocities that are exact for Gaussians, and an update of the student."""

from collections.abc import Callable

import torch
from constant_teacher import answered
from torch import Tensor

from wandistiller.batch import STUDENT, Conditioning, Prediction, State
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.engine.batch_size import BatchSize
from wandistiller.flow import FewSteps, FlowSchedule
from wandistiller.objectives.dmd2 import CRITIC, Dmd2
from wandistiller.objectives.rollout import Rollout, drawn
from wandistiller.objectives.script import TEACHER, Loss, Slope

SHAPE = (2, 1, 4, 4)
SCHEDULE = FlowSchedule(3.0, None, seed=0, few=FewSteps((1.0, 0.75)))


class Texts:
    """Data of texts alone, all the same."""

    def __init__(self, text_LD: Tensor | None = None):
        self._text_LD = torch.zeros(1, 1) if text_LD is None else text_LD

    def conditioning(self, sample_index_B: list[int]) -> Conditioning:
        return Conditioning(self._text_LD.expand(len(sample_index_B), -1, -1))


def source(schedule: FlowSchedule, samples: int = 4, shape: tuple[int, ...] = SHAPE) -> MicroBatches:
    """Eight samples an update, in micro-steps of `samples`."""
    return MicroBatches(Texts(), schedule, BatchSize(samples, 8 // samples, 8), shape)


def start(step: int = 0) -> Rollout:
    return drawn(source(SCHEDULE), step, 0)


def gaussian(mean: float, deviation: float) -> Callable[[State], Tensor]:
    """The exact velocity where clean latents are independent Gaussians: (x - E[x0 | x]) / t."""

    def velocity(batch: State) -> Tensor:
        t, x = batch.sigma_B.view(-1, 1, 1, 1, 1), batch.x_t_BCFHW
        variance = (1 - t) ** 2 * deviation**2 + t**2
        x0 = mean + (1 - t) * deviation**2 / variance * (x - (1 - t) * mean)
        return (x - x0) / t

    return velocity


OF_TEACHER = gaussian(0.5, 0.3)


def update_of_student(
    term: Dmd2,
    batch: Rollout,
    v_BCFHW: Tensor,
    critic: Callable[[State], Tensor],
    slope: Callable[[Slope], Tensor] | None = None,
) -> Loss:
    """The student's update from a state at which its velocity is `v_BCFHW`."""
    networks = {
        role: lambda ask, v=v: Prediction(v(ask.state))
        for role, v in ((TEACHER, OF_TEACHER), (CRITIC, critic))
    }
    script = term.script(STUDENT, {Dmd2.states: batch}, SCHEDULE)
    return answered(script, networks, lambda _: Prediction(v_BCFHW), slope)[STUDENT]
