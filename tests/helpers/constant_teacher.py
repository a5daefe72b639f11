"""A teacher of one velocity everywhere, a batch for it, and targets beside a student of velocity 0."""

from typing import Any

import torch

from wandistiller.batch import Batch, Conditioning, Prediction
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.base import Networks
from wandistiller.objectives.objective import Objective
from wandistiller.teacher.base import Teacher

X0, NOISE = torch.zeros(2, 1, 1, 2, 2), torch.full((2, 1, 1, 2, 2), 2.0)
BATCH = Batch(
    x0_BCFHW=X0,
    noise_BCFHW=NOISE,
    x_t_BCFHW=X0,
    sigma_B=torch.tensor([0.5, 0.5]),
    conditioning=Conditioning(torch.zeros(2, 1, 1)),
    expert=Expert.HIGH_NOISE,
)


class Constant(Teacher):
    """A teacher whose velocity is one number everywhere, and whose hidden states are the blocks' numbers."""

    def __init__(self, value: float):
        self.value = value

    def predict_all(self, batches: list[Batch], blocks: tuple[int, ...]) -> list[Prediction]:
        return [
            Prediction(
                torch.full_like(batch.x_t_BCFHW, self.value),
                {k: torch.full((len(batch.sigma_B), 3, 2), float(k)) for k in blocks},
            )
            for batch in batches
        ]


def zero(batch: Batch) -> torch.Tensor:
    """The velocity of a network that is 0 everywhere."""
    return torch.zeros_like(batch.x_t_BCFHW)


def losses(
    objective: Objective, predictions: dict[str, Prediction], matched: list[Any], batches: dict[str, Batch]
) -> torch.Tensor:
    """Loss_TB of terms that need no samples."""
    loss_TB, _ = objective.losses(predictions, matched, batches, Networks(zero))
    return loss_TB


def targets(
    objective: Objective, teacher: Teacher | None, batches: dict[str, Batch]
) -> list[Prediction | None]:
    """What the terms match, for a student whose velocity is 0."""
    schedule = FlowSchedule(shift=3, boundary=None, seed=0)
    networks = Networks(zero)
    (predicted,) = objective.predictions(teacher, [batches])
    return objective.targets(predicted, batches, networks, schedule)
