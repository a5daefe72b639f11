"""What the student is asked to match. An objective is a function of (teacher, batch) and then of the student's answer."""

from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor

from wandistiller.batch import Batch


class Teacher(Protocol):
    """Whatever answers with a velocity; where its weights live is its own business."""

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW on the batch's device, float32, without gradient."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class VelocityMatching:
    """Match the guided teacher's velocity on states of the path.

    L = (1 - data_weight) ||v_S - v*||^2 + data_weight ||v_S - (noise - x0)||^2, mean over a sample's elements.
    Source: Hinton et al. 2015, arXiv:1503.02531 (matching outputs, with a weight on the true target); TinyFusion,
    Fang et al. 2024, arXiv:2412.01199, uses 0.9 : 0.1. Guidance is folded into v* by the teacher.
    """

    data_weight: float = 0.0
    """Weight in [0, 1] of the data's own velocity; only of use with real images, not with teacher rollouts."""

    def problems(self) -> list[str]:
        if type(self.data_weight) in (int, float) and 0 <= self.data_weight <= 1:
            return []
        return [f"`objective.data_weight` is {self.data_weight!r}. Write a number from 0 to 1."]

    def target(self, teacher: Teacher, batch: Batch) -> Tensor:
        """What `loss` compares with: the teacher's v_BCFHW, float32."""
        return teacher.velocity(batch)

    def loss(self, v_BCFHW: Tensor, target_BCFHW: Tensor, batch: Batch) -> Tensor:
        """Loss per sample, loss_B, float32."""
        loss_B = mean_square(v_BCFHW - target_BCFHW)
        if self.data_weight:
            data_B = mean_square(v_BCFHW - (batch.noise_BCFHW - batch.x0_BCFHW))
            loss_B = (1 - self.data_weight) * loss_B + self.data_weight * data_B
        return loss_B


def mean_square(difference_BCFHW: Tensor) -> Tensor:
    """Mean of squares over each sample, float32, so that no bf16 mean runs over millions of numbers."""
    return difference_BCFHW.float().square().flatten(1).mean(1)


OBJECTIVES = {"velocity": VelocityMatching}


def objective_keys(name: str) -> list[str]:
    """The settings that the objective `name` reads from a recipe's "objective" section."""
    return [f.name for f in fields(OBJECTIVES[name])]
