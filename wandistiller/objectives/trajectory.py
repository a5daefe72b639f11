"""Trajectory regression: the student's velocity against the teacher's own sampling path."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wandistiller.batch import PATH, Batch, Prediction, State
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.objectives.base import ALONG, Aim, Term, mean_square


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRegression(Term):
    """Match the velocity of a segment of the guided teacher's cached path at its start; needs no teacher.

    L = ||v_S(x_s, sigma_s) - (x_s - x_s+1) / (sigma_s - sigma_s+1)||^2, mean over a sample's elements.
    Source: Luhman and Luhman 2021, arXiv:2101.02388; CausVid, Yin et al. 2024, arXiv:2412.07772 (warm-up).
    """

    states: ClassVar[str] = PATH

    @property
    def aim(self) -> Aim:
        return Aim(ALONG)

    @property
    def needs_teacher(self) -> bool:
        return False

    def draw(self, role: str, source: MicroBatches, update: int, micro: int) -> dict[str, State]:
        return {PATH: source.on_path(update, micro)}

    def loss(self, prediction: Prediction, target: Prediction | None, batch: Batch) -> Tensor:
        return mean_square(prediction.v_BCFHW - batch.v_BCFHW)
