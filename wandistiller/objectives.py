"""What the student is asked to match: a weighted sum of terms, each a loss per sample at states of one kind."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from wandistiller.batch import Answer, Batch
from wandistiller.problems import ConfigError, problem, unknown_keys

NOISED, PATH = "noised", "path"
"""The two kinds of states: clean latents with noise added, and the teacher's own states while it sampled."""


class Teacher(Protocol):
    """Whatever answers with a velocity; where its weights live is its own business."""

    def answer(self, batch: Batch, blocks: tuple[int, ...]) -> Answer:
        """v_BCFHW and the hidden states after `blocks`, on the batch's device, without gradient."""
        ...

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW on the batch's device, float32, without gradient."""
        return self.answer(batch, ()).v_BCFHW


def _logit_normal(sigma_B: Tensor) -> Tensor:
    """Density of sigma whose logit is standard normal; 0 at both ends."""
    z_B = torch.logit(sigma_B, eps=1e-6)
    return torch.exp(-z_B.square() / 2) / (math.sqrt(2 * math.pi) * torch.sigmoid(z_B) * torch.sigmoid(-z_B))


SIGMA_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": torch.ones_like,
    # Esser et al. 2024, arXiv:2403.03206, section 3.1: the densities of its logit-normal (m = 0, s = 1) and CosMap draws
    "logit_normal": _logit_normal,
    "cosmap": lambda sigma_B: 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B.square())),
    # Hang et al. 2023, arXiv:2303.09556: min(SNR, 5) on x0's error, which is sigma^2 times v's; SNR = (1 - sigma)^2 / sigma^2
    "min_snr": lambda sigma_B: torch.minimum((1 - sigma_B).square(), 5 * sigma_B.square()),
}
"""What a loss at sigma_B counts, on top of how often that sigma is drawn; all but min_snr have the mean 1 over [0, 1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Term(ABC):
    """One loss; its fields are its keys in a recipe's "objective"."""

    name: ClassVar[str]
    states: ClassVar[str] = NOISED
    """The kind of states that it looks at."""
    weight: float = 1.0
    """What it counts in the sum, above 0."""

    @property
    def needs_teacher(self) -> bool:
        return True

    def problems(self) -> list[tuple[str, str]]:
        """Each wrong value's key, and what to write."""
        return [] if _is_number(self.weight) and self.weight > 0 else [("weight", "Write a number above 0.")]

    def for_student(self, lineage: list[int]) -> Self:
        """The term with what follows from the student's lineage: for each of its blocks the teacher's."""
        return self

    @abstractmethod
    def loss(self, answer: Answer, target: Answer | None, batch: Batch) -> Tensor:
        """loss_B, float32.

        Args:
            answer: the student's.
            target: the teacher's, at noised states, if any term needs it.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class VelocityMatching(Term):
    """Match the guided teacher's velocity on noised data.

    L = w(sigma) ((1 - data_weight) ||v_S - v*||^2 + data_weight ||v_S - (noise - x0)||^2), mean over a sample's elements.
    Source: Hinton et al. 2015, arXiv:1503.02531 (matching outputs, with a weight on the true target); TinyFusion,
    Fang et al. 2024, arXiv:2412.01199, uses 0.9 : 0.1. Guidance is folded into v* by the teacher.
    """

    name: ClassVar[str] = "velocity"
    data_weight: float = 0.0
    """Weight in [0, 1] of the data's own velocity; only of use with real images, not with teacher rollouts."""
    sigma_weight: str = "uniform"
    """w: a name in SIGMA_WEIGHTS."""

    @property
    def needs_teacher(self) -> bool:
        return self.data_weight < 1

    def problems(self) -> list[tuple[str, str]]:
        found = Term.problems(self)
        if not (_is_number(self.data_weight) and 0 <= self.data_weight <= 1):
            found.append(("data_weight", "Write a number from 0 to 1."))
        if not isinstance(self.sigma_weight, str) or self.sigma_weight not in SIGMA_WEIGHTS:
            found.append(("sigma_weight", f"Write one of: {', '.join(SIGMA_WEIGHTS)}."))
        return found

    def loss(self, answer: Answer, target: Answer | None, batch: Batch) -> Tensor:
        parts_B = []
        if self.data_weight < 1:
            parts_B.append((1 - self.data_weight) * mean_square(answer.v_BCFHW - target.v_BCFHW))
        if self.data_weight > 0:
            parts_B.append(self.data_weight * mean_square(answer.v_BCFHW - batch.v_BCFHW))
        return SIGMA_WEIGHTS[self.sigma_weight](batch.sigma_B) * sum(parts_B)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureMatching(Term):
    """Match the teacher's hidden states, through a projection P_k where the student is of another width.

    L = 1/|K| sum_k ||P_k h_S^k - h_T^m(k)||^2 / ||h_T^m(k)||^2, K `blocks`, m(k) the last teacher block that student block
    k stands for. Source: BK-SDM, Kim et al. 2023, arXiv:2305.15798; the division, which makes it a share of the teacher's
    states as large for every block and model, is ours.
    """

    name: ClassVar[str] = "feature"
    blocks: list[int] | None = None
    """K, the student's block numbers; None: every one. Each keeps its states in memory until the backward pass."""
    teacher_blocks: list[int] | None = None
    """m(k) for each of K; None: as the student's lineage says."""

    def problems(self) -> list[tuple[str, str]]:
        found = Term.problems(self)
        for key in ("blocks", "teacher_blocks"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, list) or not value or any(type(k) is not int for k in value)):
                found.append((key, "Write a list of block numbers."))
        if not found and self.teacher_blocks and len(self.teacher_blocks) != len(self.blocks or ()):
            found.append(("teacher_blocks", "Write as many as there are `blocks`."))
        return found

    def for_student(self, lineage: list[int]) -> Self:
        blocks = self.blocks or list(range(len(lineage)))
        return replace(self, blocks=blocks, teacher_blocks=self.teacher_blocks or [lineage[k] for k in blocks])

    def loss(self, answer: Answer, target: Answer | None, batch: Batch) -> Tensor:
        pairs = [(answer.features[k], target.features[m]) for k, m in zip(self.blocks, self.teacher_blocks, strict=True)]
        return torch.stack([mean_square(h_S.float() - h_T.float()) / mean_square(h_T) for h_S, h_T in pairs]).mean(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRegression(Term):
    """Match the velocity of a segment of the guided teacher's cached path at its start; no teacher is asked.

    L = ||v_S(x_s, sigma_s) - (x_s - x_s+1) / (sigma_s - sigma_s+1)||^2, mean over a sample's elements.
    Source: Luhman and Luhman 2021, arXiv:2101.02388; CausVid, Yin et al. 2024, arXiv:2412.07772 (as a warm-up).
    """

    name: ClassVar[str] = "trajectory"
    states: ClassVar[str] = PATH

    @property
    def needs_teacher(self) -> bool:
        return False

    def loss(self, answer: Answer, target: Answer | None, batch: Batch) -> Tensor:
        return mean_square(answer.v_BCFHW - batch.v_BCFHW)


@dataclass(frozen=True, slots=True)
class Objective:
    """A weighted sum of terms."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        """For people and for a checkpoint's identity: `velocity + 0.1 feature(blocks=[1, 3])`, settings that differ."""
        return " + ".join(_shown(term) for term in self.terms)

    @property
    def states(self) -> set[str]:
        """The kinds of states that its terms look at."""
        return {term.states for term in self.terms}

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.terms)

    @property
    def feature_term(self) -> FeatureMatching | None:
        """The term that compares hidden states."""
        return next((term for term in self.terms if isinstance(term, FeatureMatching)), None)

    def for_student(self, lineage: list[int]) -> "Objective":
        """The objective of a student whose blocks stand for these blocks of the teacher."""
        return Objective(tuple(term.for_student(lineage) for term in self.terms))

    def target(self, teacher: Teacher | None, batches: dict[str, Batch]) -> Answer | None:
        """The teacher's answer at noised states, if a term needs it: the velocity and the hidden states to match."""
        if not self.needs_teacher:
            return None
        blocks = tuple(sorted(set(self.feature_term.teacher_blocks))) if self.feature_term else ()
        return teacher.answer(batches[NOISED], blocks)

    def losses(self, answers: dict[str, Answer], target: Answer | None, batches: dict[str, Batch]) -> Tensor:
        """loss_TB of each term T, unweighted, float32; answers and batches by kind of states."""
        return torch.stack([t.loss(answers[t.states], target, batches[t.states]) for t in self.terms])

    def total(self, losses: Tensor | list[float]) -> Tensor | float:
        """The weighted sum: loss_B of loss_TB, or a number of one for each term."""
        return sum(term.weight * loss for term, loss in zip(self.terms, losses, strict=True))

    def named(self, losses: list[float]) -> dict[str, dict[str, float]]:
        """What metrics say beside the sum: each term's own loss, unweighted, if there are several."""
        names = [term.name for term in self.terms]
        return {"losses": dict(zip(names, losses, strict=True))} if len(names) > 1 else {}


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over each sample, float32, so that no bf16 mean runs over millions of numbers."""
    return x.float().square().flatten(1).mean(1)


OBJECTIVES: dict[str, type[Term]] = {term.name: term for term in (VelocityMatching, FeatureMatching, TrajectoryRegression)}


def read_objective(given: str | dict[str, Any] | list[str | dict[str, Any]]) -> Objective:
    """A recipe's "objective": a name, {"name": ..., settings}, or a list of these to be summed.

    Raises:
        ConfigError: with all problems at once.
    """
    several = isinstance(given, list)
    terms, found = [], [] if given != [] else [problem("recipe", "objective", given, f"Write one of: {', '.join(OBJECTIVES)}.")]
    for i, one in enumerate(given if several else [given]):
        where = f"objective[{i}]" if several else "objective"
        settings = {"name": one} if isinstance(one, str) else dict(one)
        name = settings.pop("name", "velocity")
        if not isinstance(name, str) or name not in OBJECTIVES:
            found.append(problem("recipe", where, name, f"Write one of: {', '.join(OBJECTIVES)}."))
        elif unknown := unknown_keys("recipe", settings, objective_keys(name), f"{where}."):
            found += unknown
        else:
            term = OBJECTIVES[name](**settings)
            terms.append(term)
            found += [problem("recipe", f"{where}.{key}", getattr(term, key), remedy) for key, remedy in term.problems()]
    names = [term.name for term in terms]
    found += [f"recipe: `objective` names {name} twice. Keep one." for name in OBJECTIVES if names.count(name) > 1]
    if found:
        raise ConfigError(*found)
    return Objective(tuple(terms))


def objective_keys(name: str) -> list[str]:
    """The settings that the objective `name` reads from a recipe's "objective" section."""
    return [f.name for f in fields(OBJECTIVES[name])]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(term: Term) -> str:
    settings = {f.name: getattr(term, f.name) for f in fields(term) if getattr(term, f.name) != f.default}
    weight = f"{settings.pop('weight'):g} " if "weight" in settings else ""
    return weight + term.name + (f"({', '.join(f'{k}={v}' for k, v in settings.items())})" if settings else "")
