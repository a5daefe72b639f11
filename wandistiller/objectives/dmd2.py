"""Distribution matching: the student's own samples move to where the teacher's are likelier than its own."""

import statistics
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn.functional import softplus

from wandistiller.batch import GENERATED, Batch, Expert, GeneratedBatch, JudgedBatch, Prediction
from wandistiller.distributed import sequence
from wandistiller.flow import EULER, FlowSchedule, clean
from wandistiller.objectives.base import Critic, Networks, Term, mean_square
from wandistiller.simulation import judged
from wandistiller.utils.validation import NotNegative, Positive, Share

LEAST = 1e-4
"""Least divisor of the gradient."""


def realism(prediction: Prediction) -> Tensor:
    """Return the mean logit_B of a critic's heads that a sample is real."""
    heads = [logit_BS1.float().flatten(1).mean(1) for logit_BS1 in prediction.features.values()]
    return sequence.mean(torch.stack(heads).mean(0))  # of this rank's patches, where several share a sample


def heads_loss(fake: Prediction, real: Prediction) -> Tensor:
    """Compute loss_B of a critic's heads on samples of the student's and on cached latents at the same noise.

    softplus(D(fake)) + softplus(-D(real)). Source: Goodfellow et al. 2014, arXiv:1406.2661.
    """
    return softplus(realism(fake)) + softplus(-realism(real))


class Judges:
    """Teacher and critic, which are called once the student's samples are known."""

    def __init__(self, networks: Networks, gan: float = 0.0):
        """`gan`: weight of the critic's heads."""
        self._teacher, self._critic, self._slope = networks.teacher, networks.critic, networks.slope
        self._gan = gan
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
            "gradient": _mean_of(gradient_BCFHW.abs()),
            "deviation": batch.x0_BCFHW.flatten(1).std(1),
        }
        if not self._gan:
            return gradient_BCFHW
        adversarial_BCFHW = self._gan * self._adversarial(batch)
        self.watched["adversarial"] = _mean_of(adversarial_BCFHW.abs())
        return gradient_BCFHW + adversarial_BCFHW

    def _adversarial(self, batch: JudgedBatch) -> Tensor:
        """Return the gradient in x0_BCFHW of softplus(-D(x_t)), times the elements of the loss's mean."""
        elements = batch.x0_BCFHW[0].numel()  # inside: a mean's gradient is too small for float16
        slope_BCFHW = self._slope(batch, lambda prediction: elements * softplus(-realism(prediction)).sum())
        return (1 - batch.sigma_B.view(-1, 1, 1, 1, 1)) * slope_BCFHW


def _mean_of(x_BCFHW: Tensor) -> Tensor:
    return x_BCFHW.flatten(1).mean(1)


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
    gan: NotNegative = 0.0
    """Weight, such as 0.03, of heads on the critic that tell samples from cached latents; 0: no heads."""

    def student_calls(self, schedule: FlowSchedule) -> float:
        # to a drawn exit in each update, and once more for the samples of the critic's
        return (1 + self.critic_updates) * statistics.mean(schedule.exits()) + self.critic_updates

    @property
    def sampling_steps(self) -> int | None:
        return self.steps

    @property
    def few_step_sampler(self) -> str:
        return self.sampler

    @property
    def critic(self) -> Critic | None:
        settings = self.critic_updates, self.critic_start, self.critic_lr, self.critic_follows
        return Critic(*settings, judges_reality=self.gan > 0)

    @property
    def needs_latents(self) -> bool:
        return self.gan > 0

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
        for key in ("expert", "critic_follows"):
            if self.gan and getattr(self, key):
                problems.append(f"recipe: `{where}.gan` does not go with `{where}.{key}`. Keep one of them.")
        if not self.critic_follows or self.critic_start == "student":
            return problems
        return problems + [
            f"recipe: `{where}.critic_follows` is {self.critic_follows}, which needs a critic of the "
            'student\'s shape. Write `critic_start` "student", or leave it out.'
        ]

    def target(
        self, teacher: Prediction | None, batch: Batch, networks: Networks, schedule: FlowSchedule
    ) -> Judges:
        return Judges(networks, self.gan)

    def loss(self, prediction: Prediction, target: Any, batch: GeneratedBatch) -> Tensor:
        noised = judged(batch, prediction.v_BCFHW.detach())
        x0_BCFHW = clean(batch.x_t_BCFHW, prediction.v_BCFHW, batch.sigma_B)
        wanted_BCFHW = noised.x0_BCFHW - target.gradient(noised)
        target.watched["exit"] = torch.full_like(batch.sigma_B, batch.exit)
        return mean_square(x0_BCFHW - wanted_BCFHW) / 2

    def watched(self, target: Any) -> dict[str, Tensor]:
        return target.watched
