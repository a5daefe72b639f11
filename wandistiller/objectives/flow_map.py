"""A flow map: the student's mean velocity from any noise level to any lower one, for any number of steps."""

from collections.abc import Generator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Batch, Prediction
from wandistiller.flow import FLOW_MAP, FlowSchedule
from wandistiller.objectives.base import Aim, RunFacts, Term, mean_square
from wandistiller.objectives.script import TEACHER, Ask
from wandistiller.utils.errors import RECIPE, Problem
from wandistiller.utils.validation import Share, Steps

TO_ANY_LEVEL = "to every lower noise level"
"""Place to which a mean velocity leads."""
STEP = 0.005
"""Distance in noise level of the states of a central difference from its middle."""
Target = tuple[Tensor, Tensor]
"""The mean velocity to match, and weight_B: the path's share in the mean square of both parts; 1 at r = t."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowMap(Term):
    """Match the mean velocity u(x_t, t, r) from noise level t to r <= t, by its derivative along the path.

    As (t - r) u is the integral of the path's velocity v, u = v - (t - r) du/dt. Without gradient,
    du/dt = (u(x_t + d v, t + d, r) - u(x_t - d v, t - d, r)) / 2d, d = 0.005, of less at the ends 1 and r.
    L = w ||u - sg(v - (t - r) du/dt)||^2, mean over a sample's elements: velocity matching at r = t, where
    w = 1; elsewhere w = ||v||^2 / (||v||^2 + ||(t - r) du/dt||^2), so that no long interval outweighs it.
    v is the guided teacher's at x_t. `FlowSchedule.ends` draws r.

    Source: Geng et al. 2025, arXiv:2505.13447; the difference and the network: Gu et al. 2026,
    arXiv:2605.13724.
    """

    data_weight: Share = 0.0
    """Weight in [0, 1] of the data's own velocity in v; only useful with real media."""
    steps: Steps = 4
    """Sampling steps of pictures, and of samples where no number is given; any other will do."""

    @property
    def needs_teacher(self) -> bool:
        return self.data_weight < 1

    @property
    def aim(self) -> Aim:
        return Aim(TO_ANY_LEVEL, self.steps, FLOW_MAP)

    def target(self, batch: Batch, schedule: FlowSchedule) -> Generator[Ask | list[Ask], Prediction, Target]:
        parts = []
        if self.data_weight < 1:
            teacher = yield Ask(TEACHER, batch)
            parts.append((1 - self.data_weight) * teacher.v_BCFHW)
        if self.data_weight > 0:
            parts.append(self.data_weight * batch.v_BCFHW)
        v_BCFHW = sum(parts)
        t_B, r_B = batch.sigma_B, batch.end_B
        levels = (t_B + STEP).clamp(max=1), torch.maximum(t_B - STEP, r_B)
        asks = [
            replace(batch, x_t_BCFHW=batch.x_t_BCFHW + _of_samples(level_B - t_B) * v_BCFHW, sigma_B=level_B)
            for level_B in levels
        ]
        later, earlier = yield [Ask(STUDENT, state) for state in asks]
        distance_B = (levels[0] - levels[1]).clamp(min=torch.finfo(t_B.dtype).tiny)  # 0 at t = r = 1
        slope_BCFHW = (later.v_BCFHW - earlier.v_BCFHW) / _of_samples(distance_B)
        change_BCFHW = _of_samples(t_B - r_B) * slope_BCFHW
        of_path_B, of_change_B = mean_square(v_BCFHW), mean_square(change_BCFHW)
        return v_BCFHW - change_BCFHW, of_path_B / (of_path_B + of_change_B)

    def loss(self, prediction: Prediction, target: Target, batch: Batch) -> Tensor:
        mean_BCFHW, weight_B = target
        return weight_B * mean_square(prediction.v_BCFHW - mean_BCFHW)


def unfit(run: RunFacts) -> list[Problem]:
    """List why the student of a run cannot be a flow map."""
    reasons = {
        "The student has two experts; one network must lead from noise to data. "
        'Write "experts": "one".': run.has_two_experts,
        "The teacher is a flow map already. Give the Wan that it was made of; start the student from it "
        "by `init`.": run.teaches_flow_map,
        "The teacher's latents are joined with given frames, which diffusers' AnyFlowPipeline (0.42.1) "
        "cannot give. Give a Wan of text, or Wan2.2 5B.": run.joins_frames,
    }
    texts = [f"`objective` trains a flow map. {why}" for why, is_so in reasons.items() if is_so]
    return [Problem(text, RECIPE, "objective") for text in texts]


def _of_samples(x_B: Tensor) -> Tensor:
    return x_B.float().view(-1, 1, 1, 1, 1)
