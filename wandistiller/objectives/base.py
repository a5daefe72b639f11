"""A term of the training objective: one float32 loss per sample, its settings and its weight over sigma."""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from wandistiller.batch import NOISED, PATH, STUDENT, Prediction, State
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import EULER, FlowSchedule
from wandistiller.objectives.script import TEACHER, Ask, Learn, Loss, Script
from wandistiller.utils.validation import Positive

ALONG, TO_DATA = "along the teacher's path", "to data in one step"
"""Places to which a velocity leads."""


class Aim(NamedTuple):
    """The student that a term trains towards: where its velocity leads, in how many steps."""

    destination: str | None = None
    """The place, in words, to which the loss leads the velocity; None: any may be added to it.

    Of losses with other destinations the network would learn the mean, which leads to none of them."""
    steps: int | None = None
    """Sampling steps; None: as many as its teacher."""
    sampler: str = EULER
    """Of those steps."""
    ends_segments: bool = False
    """The velocity leads to the end of a segment, or of an expert's part."""
    expert: Expert | None = None
    """The only expert of a two-expert student that is trained; None: all."""


class RunFacts(NamedTuple):
    """Facts of the rest of a run that terms may know."""

    layers: int
    teacher_layers: int
    has_two_experts: bool = False
    is_measured: bool = False
    """Building the student needs the whole teacher."""
    has_buckets: bool = False
    adapts_teacher: bool = False
    """The student is the teacher with adapters."""
    trains_part: bool = False
    """Only a part of a student's own weights is trained, or adapters of them."""
    teaches_flow_map: bool = False
    """The teacher is a network of two times."""
    joins_frames: bool = False
    """Given frames are joined to the teacher's latents, as channels."""


class Role(NamedTuple):
    """Settings of a network that an objective trains beside the student."""

    name: str
    """In checkpoints and metrics."""
    updates: int
    """Updates before each of the student's."""
    losses: dict[str, float]
    """Its losses, by name, and their weights."""
    start: str = STUDENT
    """`student` or `teacher`: whose shape and weights it starts from."""
    lr: float | None = None
    """Learning rate; None: the student's."""
    follows: float = 0.0
    """Share of the way that its weights go to the student's after each of the student's updates."""
    has_heads: bool = False
    """Its blocks have heads, which learn to tell the student's samples from cached latents."""
    is_shared: bool = False
    """The last of its updates is the student's too: one script, on the same samples, trains both."""

    @property
    def updates_alone(self) -> int:
        """Its updates before each of the student's, but for one that it shares."""
        return self.updates - self.is_shared


class Limit(NamedTuple):
    """A number of an objective that is above a limit when training fails."""

    alarm: str
    number: str
    most: float
    text: str
    """What it means and what to do; `{value:.2f}` is the number, or its growth."""
    grows: bool = True
    """The limit is for the mean of the last steps over that of the first; else for its distance from 0."""
    beyond: float = 0.0
    """Least mean of the last steps at which growth counts."""
    within: str | None = None
    """Compare only steps in which this number is as large as in the highest eighth of the first ones."""


SATURATION = (
    "The samples' latents spread {value:.2f} times as far as those {of}: colours saturate. Lower "
    "`guidance_scale` by 1, give dmd2 `projected` true, or make fewer updates, from an earlier checkpoint."
)
"""Text of an alarm about the deviation of samples, beside `of`."""


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
class Term:
    """One loss, the only term of its file; its fields are its keys in a recipe's "objective"."""

    states: ClassVar[str] = NOISED
    """Kind of states that the loss is computed at: NOISED, PATH or the term's own."""
    limits: ClassVar[tuple[Limit, ...]] = ()
    """When its `numbers` mean that training fails."""
    weight: Positive = 1.0
    """Factor in the sum, above 0."""

    @property
    def name(self) -> str:
        """Name in a recipe and in metrics: that of the term's file."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def samples(self) -> bool:
        """True if the loss is computed at the student's own samples, and not at cached latents."""
        return self.states not in (NOISED, PATH)

    @property
    def needs_teacher(self) -> bool:
        """True if the loss needs the teacher's prediction."""
        return True

    @property
    def aim(self) -> Aim:
        """The student that the loss trains towards."""
        return Aim()

    @property
    def roles(self) -> tuple[Role, ...]:
        """Networks that are trained beside the student; others have no term of the same role."""
        return ()

    @property
    def matched_blocks(self) -> list[tuple[int, int]]:
        """Student and teacher blocks whose hidden states are compared; final after `for_student`."""
        return []

    def problems(self, where: str) -> list[str]:
        """List the settings, read under the recipe key `where`, that do not go together."""
        return []

    def combined_problems(self, where: str, run: RunFacts) -> list[str]:
        """List the settings, read under the recipe key `where`, that do not go with the rest of the run."""
        return []

    def for_student(self, lineage: list[int]) -> Self:
        """Return the term with the settings that follow from the teacher block of each student block."""
        return self

    def draw(self, role: str, source: MicroBatches, update: int, micro: int) -> dict[str, State]:
        """Return this rank's samples of a micro-step of a role's update, by kind of states.

        Args:
            role: STUDENT, or the name of one of `roles`.
        """
        return {self.states: source.noised(update, micro)}

    def begun(self, role: str, update: int, schedule: FlowSchedule) -> int:
        """Return the update whose prompts a role's update has: an earlier one if its samples go on."""
        return update

    def roll_out(
        self,
        role: str,
        states: dict[str, State],
        schedule: FlowSchedule,
        carried_BCFHW: Tensor | None = None,
    ) -> Generator[Ask, Prediction, dict[str, State]]:
        """Sample with the student from what `draw` drew; return the states that `script` begins with.

        It asks the student alone, whose weights are the same in all updates of a step.

        Args:
            carried_BCFHW: states to go on from, which the loss of the role's last update had.
        """
        yield from ()
        return states

    def script(self, role: str, states: dict[str, State], schedule: FlowSchedule) -> Script:
        """Play a micro-step of a role's update.

        Args:
            states: from `roll_out`, by kind.
            schedule: the distribution that sigma was drawn from.
        """
        state = states[self.states]
        target = yield from self.target(state, schedule)
        prediction = yield Learn(state, role)
        return Loss(self.loss(prediction, target, state)[None])

    def target(self, batch: State, schedule: FlowSchedule) -> Generator[Ask, Prediction, Any]:
        """Ask for what the student is to match, and return it; by default the teacher's prediction."""
        if not self.needs_teacher:
            return None
        return (yield Ask(TEACHER, batch, tuple(sorted({block for _, block in self.matched_blocks}))))

    def loss(self, prediction: Prediction, target: Any, batch: State) -> Tensor:
        """Compute loss_B of a term that compares a prediction with a target, float32."""
        raise TypeError(f"{self.name} has a script of its own")

    def __str__(self) -> str:
        """Weight, name and settings other than the defaults: `0.1 feature(blocks=[1, 3])`."""
        usual = type(self)()
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: value for name, value in values.items() if value != getattr(usual, name)}
        weight = f"{changed.pop('weight'):g} " if "weight" in changed else ""
        settings = ", ".join(f"{key}={value}" for key, value in changed.items())
        return f"{weight}{self.name}({settings})" if settings else f"{weight}{self.name}"


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over each sample, float32, so that no bf16 mean runs over millions of numbers."""
    return x.float().square().flatten(1).mean(1)
