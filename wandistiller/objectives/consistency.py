"""Consistency: the student's average velocity from a state to the end of its segment, in one step."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Batch, Prediction
from wandistiller.flow import EULER, RENOISE, FlowSchedule
from wandistiller.objectives.base import TO_DATA, Aim, Term, mean_square
from wandistiller.objectives.script import TEACHER, Ask
from wandistiller.utils.errors import RECIPE, Problem
from wandistiller.utils.validation import Steps, write

CONTINUOUS = 100
"""Intervals of the limit's differences; shorter ones would be lost in bf16 outputs, which are off by 2^-8."""
SMOOTH = 0.1
"""Added to the root mean square by which the limit's gradient is normalised; a small one stays small."""
Target = tuple[Tensor, Tensor]
"""The velocity to match, and share_B: the length of the teacher's step over that of the segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Consistency(Term):
    """Match a step of the guided teacher, followed by the student's own velocity from where it ends.

    A step of the teacher leads from x_t at t = shift(u) to x' = x_t - (t - t') v* at
    t' = max(shift(u - 1/intervals), e), e the end of the segment. The student's velocity leads to e in one
    step if it is the mean of both: target = a v* + (1 - a) sg v_S(x', t'), a = (t - t') / (t - e).
    L = ||v_S(x_t, t) - target||^2, mean over a sample's elements. `continuous` divides L by
    sg(sqrt(L) + 0.1 a): the residual over a, a derivative in t, is normalised by its root mean square + 0.1.

    Source: Song et al. 2023, arXiv:2303.01469; edges: Wang et al. 2024, arXiv:2405.18407; the limit of many
    intervals and its normalised gradient: Lu and Song 2024, arXiv:2410.11081.
    """

    intervals: Annotated[
        Steps | Literal["continuous"],
        write('a number of intervals from 1 to 1000, or "continuous"'),
    ] = 40
    """Teacher's steps from pure noise to data; `continuous`: the limit of many, with a bounded gradient."""
    edges: Steps | None = None
    """Sampling steps to train for, whose noise levels end the segments; None: all lead to data."""
    steps: Steps | None = None
    """Sampling steps that noise the data again where all segments lead to it; None with `edges`, or where
    another term has them."""

    @property
    def aim(self) -> Aim:
        destination = f"to the next of {self.edges} noise levels" if (self.edges or 1) > 1 else TO_DATA
        return Aim(
            destination, self.edges or self.steps, RENOISE if self.steps else EULER, ends_segments=True
        )

    def problems(self, where: str) -> list[str]:
        if self.edges and self.intervals != "continuous" and self.edges > self.intervals:
            text = (
                f"`{where}` has edges {self.edges} and intervals {self.intervals}. Each segment needs a step "
                f"of the teacher: write {self.edges} `intervals` or more, or fewer `edges`."
            )
            return [Problem(text, RECIPE, where)]
        if not (self.edges and self.steps):
            return []
        text = (
            f"`{where}` has edges {self.edges} and steps {self.steps}. Keep `edges` for steps along "
            "the path (Euler's method), or `steps` for those that noise the data again."
        )
        return [Problem(text, RECIPE, where)]

    def target(self, batch: Batch, schedule: FlowSchedule) -> Generator[Ask, Prediction, Target]:
        t_B, next_B, share_B = self._step(batch, schedule)
        length_B1111, share_B1111 = (x_B.float().view(-1, 1, 1, 1, 1) for x_B in (t_B - next_B, share_B))
        teacher = yield Ask(TEACHER, batch)
        x_BCFHW = batch.x_t_BCFHW - length_B1111 * teacher.v_BCFHW
        rest = yield Ask(STUDENT, replace(batch, x_t_BCFHW=x_BCFHW, sigma_B=next_B.float()))
        mean_BCFHW = rest.v_BCFHW + share_B1111 * (teacher.v_BCFHW - rest.v_BCFHW)
        return mean_BCFHW, share_B.float()

    def loss(self, prediction: Prediction, target: Target, batch: Batch) -> Tensor:
        mean_BCFHW, share_B = target
        loss_B = mean_square(prediction.v_BCFHW - mean_BCFHW)
        if self.intervals != "continuous":
            return loss_B
        return loss_B / (loss_B.detach().sqrt() + SMOOTH * share_B)

    def _step(self, batch: Batch, schedule: FlowSchedule) -> tuple[Tensor, Tensor, Tensor]:
        """Return t_B, t'_B and the share a_B of the teacher's step in its segment, float64."""
        t_B = batch.sigma_B.double()
        end_B = schedule.segment_end(t_B, self.edges, batch.expert)
        intervals = CONTINUOUS if self.intervals == "continuous" else self.intervals
        next_B = torch.maximum(schedule.earlier(t_B, 1 / intervals), end_B)
        return t_B, next_B, torch.where(next_B > end_B, (t_B - next_B) / (t_B - end_B), 1.0)
