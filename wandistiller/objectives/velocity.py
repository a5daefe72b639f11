"""Velocity matching: the student's velocity against the teacher's or the true one."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from wandistiller.batch import Batch, Prediction
from wandistiller.objectives.base import ALONG, SIGMA_WEIGHTS, Aim, Term, mean_square
from wandistiller.utils.validation import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class VelocityMatching(Term):
    """Match the guided teacher's velocity on noised data.

    L = w(sigma) ((1 - data_weight) ||v_S - v*||^2 + data_weight ||v_S - (noise - x0)||^2), elements' mean.
    Source: Hinton et al. 2015, arXiv:1503.02531 (matching outputs, with a weight on the true target);
    TinyFusion, Fang et al. 2024, arXiv:2412.01199, uses 0.9 : 0.1. Guidance is folded into v* by the teacher.
    """

    data_weight: Share = 0.0
    """Weight in [0, 1] of the data's own velocity; only useful with real media, not with teacher rollouts."""
    sigma_weight: Literal[tuple(SIGMA_WEIGHTS)] = "uniform"
    """w: a name in SIGMA_WEIGHTS."""

    @property
    def aim(self) -> Aim:
        return Aim(ALONG)

    @property
    def needs_teacher(self) -> bool:
        return self.data_weight < 1

    def loss(self, prediction: Prediction, target: Prediction | None, batch: Batch) -> Tensor:
        parts_B = []
        if self.data_weight < 1:
            parts_B.append((1 - self.data_weight) * mean_square(prediction.v_BCFHW - target.v_BCFHW))
        if self.data_weight > 0:
            parts_B.append(self.data_weight * mean_square(prediction.v_BCFHW - batch.v_BCFHW))
        return SIGMA_WEIGHTS[self.sigma_weight](batch.sigma_B) * sum(parts_B)
