"""Distribution matching: the student's own samples move to where the teacher's are likelier than its own."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor

from wandistiller.batch import GENERATED, Batch, Expert, GeneratedBatch, JudgedBatch, Prediction
from wandistiller.flow import EULER, FlowSchedule, clean
from wandistiller.objectives.base import Ask, Critic, Networks, Term, mean_square
from wandistiller.simulation import judged
from wandistiller.utils.validation import Positive, Share

LEAST = 1e-4
"""Least divisor of the gradient."""


class Judges:
    """Teacher and critic, which are called once the student's samples are known."""

    def __init__(self, teacher: Ask, critic: Ask):
        self._teacher, self._critic = teacher, critic
        self.watched: dict[str, Tensor] = {}
        """Numbers of each sample of the last call, by name."""

    @torch.no_grad()
    def gradient(self, batch: JudgedBatch) -> Tensor:
        """Return the gradient in x0_BCFHW at noised samples: t (v_teacher - v_critic), normalised.

        t (v_teacher - v_critic) = x0_critic - x0_teacher, which is divided by each sample's mean distance
        from the teacher's x0. Source: Yin et al. 2024, arXiv:2311.18828, equations 7 and 8.
        """
        teacher_BCFHW, critic_BCFHW = self._teacher(batch), self._critic(batch)
        away_BCFHW = batch.x0_BCFHW - clean(batch.x_t_BCFHW, teacher_BCFHW, batch.sigma_B)
        scale_B = away_BCFHW.abs().flatten(1).mean(1).clamp(min=LEAST)
        step_B = (batch.sigma_B / scale_B).view(-1, 1, 1, 1, 1)
        gradient_BCFHW = step_B * (teacher_BCFHW - critic_BCFHW)
        errors = (mean_square(v - batch.target_BCFHW) for v in (critic_BCFHW, teacher_BCFHW))
        self.watched = {
            "critic_share": next(errors) / next(errors).clamp(min=LEAST),
            "gradient": gradient_BCFHW.abs().flatten(1).mean(1),
            "deviation": batch.x0_BCFHW.flatten(1).std(1),
        }
        return gradient_BCFHW


@dataclass(frozen=True, kw_only=True, slots=True)
class Dmd2(Term):
    """Match the distribution of the teacher's samples with those of `steps` sampling steps.

    The student samples from noise up to a drawn one of its steps, without gradient, and predicts x0 there.
    x0 is noised again to x_t, where the guided teacher and the critic, which learns the velocity of the
    student's own samples, say how to move it: L = 1/2 mean (x0 - sg(x0 - g))^2, g of `Judges.gradient`.
    A step of the run is `critic_updates` updates of the critic, each on samples of its own, and then one of
    the student. There is no data: prompts are enough.

    Of a student of two experts one is trained in a run. The high-noise one's samples lead to the hand-over
    and are judged above it; the other's begin with the finished high-noise expert.

    Source: Yin et al. 2024, arXiv:2405.14867; experts: Fan et al. 2025, arXiv:2510.27684.
    """

    states: ClassVar[str] = GENERATED

    steps: Annotated[int, Ge(1), Le(1000)] = 4
    """Sampling steps to train for."""
    sampler: Literal["euler", "renoise"] = EULER
    """Along the student's velocity, or to its clean latents, which are noised again."""
    expert: Literal["high_noise", "low_noise"] | None = None
    """The expert of a two-expert student that is trained; the high-noise one first, the other after it."""
    critic_updates: Annotated[int, Ge(1), Le(1000)] = 5
    """The critic's updates before each of the student's."""
    critic_start: Literal["student", "teacher"] = "student"
    """Weights and shape of the critic at the start: the student's, or the teacher's low-noise expert's."""
    critic_lr: Positive | None = None
    """The critic's learning rate; None: the student's."""
    critic_follows: Share = 0.0
    """Share of the way that the critic's weights go to the student's after each of its updates, 0 to 1."""

    @property
    def student_calls(self) -> float:
        # to a drawn exit in each update, and once more for the samples of the critic's
        return (1 + self.critic_updates) * (self.steps - 1) / 2 + self.critic_updates

    @property
    def sampling_steps(self) -> int | None:
        return self.steps

    @property
    def few_step_sampler(self) -> str:
        return self.sampler

    @property
    def critic(self) -> Critic | None:
        return Critic(self.critic_updates, self.critic_start, self.critic_lr, self.critic_follows)

    @property
    def trained_expert(self) -> Expert | None:
        return Expert[self.expert.upper()] if self.expert else None

    def problems(self, where: str) -> list[str]:
        problems = []
        if self.expert and self.sampler != EULER:
            remedy = 'Two experts sample along the path: write "sampler" "euler", or leave it out.'
            problems.append(
                f'recipe: `{where}.sampler` is "{self.sampler}" and `{where}.expert` given. {remedy}'
            )
        if not self.critic_follows or self.critic_start == "student":
            return problems
        return problems + [
            f"recipe: `{where}.critic_follows` is {self.critic_follows}, which needs a critic of the "
            'student\'s shape. Write `critic_start` "student", or leave it out.'
        ]

    def target(
        self, teacher: Prediction | None, batch: Batch, networks: Networks, schedule: FlowSchedule
    ) -> Judges:
        return Judges(networks.teacher, networks.critic)

    def loss(self, prediction: Prediction, target: Any, batch: GeneratedBatch) -> Tensor:
        noised = judged(batch, prediction.v_BCFHW.detach())
        x0_BCFHW = clean(batch.x_t_BCFHW, prediction.v_BCFHW, batch.sigma_B)
        wanted_BCFHW = noised.x0_BCFHW - target.gradient(noised)
        target.watched["exit"] = torch.full_like(batch.sigma_B, batch.exit)
        return mean_square(x0_BCFHW - wanted_BCFHW) / 2

    def watched(self, target: Any) -> dict[str, Tensor]:
        return target.watched
