"""A teacher of one velocity everywhere, a batch for it, and targets beside a student of velocity 0."""

import torch

from wandistiller.batch import Batch, Expert, Prediction
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.base import Networks
from wandistiller.objectives.registry import Objective
from wandistiller.teacher.base import Teacher

X0, NOISE = torch.zeros(2, 1, 1, 2, 2), torch.full((2, 1, 1, 2, 2), 2.0)
BATCH = Batch(X0, NOISE, X0, torch.tensor([0.5, 0.5]), torch.zeros(2, 1, 1), Expert.HIGH_NOISE)


class Constant(Teacher):
    """A teacher whose velocity is one number everywhere, and whose hidden states are the blocks' numbers."""

    def __init__(self, value: float):
        self.value = value

    def predict(self, batch: Batch, blocks: tuple[int, ...]) -> Prediction:
        features = {k: torch.full((len(batch.sigma_B), 3, 2), float(k)) for k in blocks}
        return Prediction(torch.full_like(batch.x_t_BCFHW, self.value), features)


def zero(batch: Batch) -> torch.Tensor:
    """The velocity of a network that is 0 everywhere."""
    return torch.zeros_like(batch.x_t_BCFHW)


def targets(
    objective: Objective, teacher: Teacher | None, batches: dict[str, Batch]
) -> list[Prediction | None]:
    """What the terms match, for a student whose velocity is 0."""
    schedule = FlowSchedule(shift=3, boundary=None, seed=0, global_batch=2)
    networks = Networks(zero, zero, zero)
    (predicted,) = objective.predictions(teacher, [batches])
    return objective.targets(predicted, batches, networks, schedule)
