"""A term of the training objective: one float32 loss per sample, its settings and its weight over sigma."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from wandistiller.batch import GENERATED, NOISED, Batch, Expert, Prediction
from wandistiller.flow import EULER, FlowSchedule
from wandistiller.utils.validation import Positive

Ask = Callable[[Batch], Tensor]
"""A network's velocity v_BCFHW of a batch, float32; without gradient where that is off."""


class Networks(NamedTuple):
    """The networks of a run; each is called on every rank or on none, with batches of one expert."""

    student: Ask
    teacher: Ask | None = None
    """With guidance."""
    critic: Ask | None = None
    slope: Callable[[Batch, Callable[[Prediction], Tensor]], Tensor] | None = None
    """Gradient in x_t_BCFHW of a number computed from the critic's prediction."""


class Critic(NamedTuple):
    """Settings of a network that learns the velocity of the student's own samples."""

    updates: int
    """Updates before each of the student's."""
    start: str
    """`student` or `teacher`: whose weights it starts from."""
    lr: float | None
    """Learning rate; None: the student's."""
    follows: float
    """Share of the way that its weights go to the student's after each of the student's updates."""
    judges_reality: bool = False
    """True if it has heads that tell the student's samples from cached latents."""


def _logit_normal(sigma_B: Tensor) -> Tensor:
    """Density of sigma whose logit is standard normal; 0 at both ends."""
    z_B = torch.logit(sigma_B, eps=1e-6)
    return torch.exp(-z_B.square() / 2) / (math.sqrt(2 * math.pi) * torch.sigmoid(z_B) * torch.sigmoid(-z_B))


SIGMA_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": torch.ones_like,
    # Esser et al. 2024, arXiv:2403.03206, section 3.1: densities of logit-normal (m = 0, s = 1) and CosMap
    "logit_normal": _logit_normal,
    "cosmap": lambda sigma_B: 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B.square())),
    # Hang et al. 2023, arXiv:2303.09556: min(SNR, 5) on the error of x0, which is sigma^2 times that of v;
    # SNR = (1 - sigma)^2 / sigma^2
    "min_snr": lambda sigma_B: torch.minimum((1 - sigma_B).square(), 5 * sigma_B.square()),
}
"""Loss weight at sigma_B, on top of the sampling density; all but min_snr average to 1 over [0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term(ABC):
    """One loss, the only term of its file; its fields are its keys in a recipe's "objective"."""

    states: ClassVar[str] = NOISED
    """Kind of states that the loss is computed at: NOISED, PATH or GENERATED."""
    weight: Positive = 1.0
    """Factor in the sum, above 0."""

    @property
    def name(self) -> str:
        """Name in a recipe and in metrics: that of the term's file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def needs_teacher(self) -> bool:
        """True if the loss needs the teacher's prediction."""
        return True

    def student_calls(self, schedule: FlowSchedule) -> float:
        """Mean number of the student's forward passes without gradient for a micro-step of each update."""
        return 0

    @property
    def needs_latents(self) -> bool:
        """True if cached latents are used."""
        return self.states != GENERATED

    @property
    def sampling_steps(self) -> int | None:
        """Number of steps that the student is to sample in; None: as many as its teacher."""
        return None

    @property
    def few_step_sampler(self) -> str:
        """Sampler of those steps."""
        return EULER

    @property
    def ends_segments(self) -> bool:
        """True if the student's velocity leads to the end of a segment, or of an expert's part."""
        return False

    @property
    def trained_expert(self) -> Expert | None:
        """The only expert of a two-expert student that is trained; None: all."""
        return None

    @property
    def critic(self) -> Critic | None:
        """Settings of the critic that the loss needs; None: it needs none."""
        return None

    @property
    def matched_blocks(self) -> list[tuple[int, int]]:
        """Student and teacher blocks whose hidden states are compared; final after `for_student`."""
        return []

    def problems(self, where: str) -> list[str]:
        """List the settings, read under the recipe key `where`, that do not go together."""
        return []

    def block_problems(self, where: str, layers: int, teacher_layers: int) -> list[str]:
        """List the settings, under the key `where`, with block numbers beyond the layers of a network."""
        return []

    def for_student(self, lineage: list[int]) -> Self:
        """Return the term with the settings that follow from the teacher block of each student block."""
        return self

    def target(
        self, teacher: Prediction | None, batch: Batch, networks: Networks, schedule: FlowSchedule
    ) -> Any:
        """Return what the student is to match, without gradient; by default the teacher's prediction.

        Args:
            teacher: the teacher's prediction at noised states, if any term needs it.
            batch: the term's states.
            networks: those of the run.
            schedule: the distribution that sigma was drawn from.
        """
        return teacher

    @abstractmethod
    def loss(self, prediction: Prediction, target: Any, batch: Batch) -> Tensor:
        """Compute loss_B, float32.

        Args:
            prediction: the student's.
            target: from the method `target`.
        """

    def watched(self, target: Any) -> dict[str, Tensor]:
        """Return numbers_B by name that show whether training goes well, after `loss`; they go to metrics."""
        return {}

    def __str__(self) -> str:
        """Weight, name and settings other than the defaults: `0.1 feature(blocks=[1, 3])`."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        weight = f"{given.pop('weight'):g} " if "weight" in given else ""
        settings = ", ".join(f"{key}={value}" for key, value in given.items())
        return f"{weight}{self.name}({settings})" if settings else f"{weight}{self.name}"


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over each sample, float32, so that no bf16 mean runs over millions of numbers."""
    return x.float().square().flatten(1).mean(1)
