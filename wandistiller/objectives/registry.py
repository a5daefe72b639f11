"""The training objective: a weighted sum of terms, each a loss per sample at states of one kind."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wandistiller.batch import CRITIC, GENERATED, NOISED, STUDENT, Batch, Expert, Prediction
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.base import Critic, Networks, Term
from wandistiller.teacher.base import Teacher
from wandistiller.utils.errors import ConfigError, nearest, problem
from wandistiller.utils.registry import classes_in
from wandistiller.utils.validation import check, types_of

OBJECTIVES = classes_in("wandistiller.objectives", Term)
"""Every term, by the name of its file."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A weighted sum of terms."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        """The sum for people and for a checkpoint's identity: `velocity + 0.1 feature(blocks=[1, 3])`."""
        return " + ".join(map(str, self.terms))

    @property
    def states(self) -> set[str]:
        """Kinds of states that the terms need."""
        return {term.states for term in self.terms}

    @property
    def needs_teacher(self) -> bool:
        """True if a term needs the teacher's prediction."""
        return any(term.needs_teacher for term in self.terms)

    @property
    def asks_at_noised(self) -> bool:
        """True if a term needs the teacher's prediction at noised states; one call is for all such terms."""
        return any(term.needs_teacher and term.states == NOISED for term in self.terms)

    @property
    def calls_at_generated(self) -> int:
        """Number of calls of the teacher at the student's own samples, in a micro-step of its update."""
        return sum(term.needs_teacher and term.states == GENERATED for term in self.terms)

    @property
    def sampling_steps(self) -> int | None:
        """Number of steps that the student is trained to sample in; None: as many as its teacher."""
        return next((n for term in self.terms if (n := term.sampling_steps)), None)

    @property
    def few_step_sampler(self) -> str | None:
        """Sampler of those steps."""
        return next((term.few_step_sampler for term in self.terms if term.sampling_steps), None)

    @property
    def trained_expert(self) -> Expert | None:
        """The only expert of a two-expert student that is trained; None: all."""
        return next((expert for term in self.terms if (expert := term.trained_expert)), None)

    @property
    def student_blocks(self) -> list[int]:
        """Student blocks whose hidden states are compared, each once; final after `for_student`."""
        return list(dict.fromkeys(k for term in self.terms for k, _ in term.matched_blocks))

    def block_problems(self, layers: int, teacher_layers: int) -> list[str]:
        """List the settings with block numbers that exceed the student's or the teacher's layers."""
        keys = [f"objective[{i}]" for i in range(len(self.terms))] if len(self.terms) > 1 else ["objective"]
        named = zip(keys, self.terms, strict=True)
        return [p for key, term in named for p in term.block_problems(key, layers, teacher_layers)]

    def for_student(self, lineage: list[int]) -> "Objective":
        """Return the objective of a student whose blocks stand for these blocks of the teacher."""
        return Objective(tuple(term.for_student(lineage) for term in self.terms))

    def predictions(
        self, teacher: Teacher | None, batches: list[dict[str, Batch]]
    ) -> list[Prediction | None]:
        """Return the teacher's prediction at the noised states of each micro-step, if a term needs it.

        Args:
            batches: by kind of states, of each micro-step.
        """
        if not self.asks_at_noised:
            return [None] * len(batches)
        blocks = {m for term in self.terms for _, m in term.matched_blocks}
        return teacher.predict_all([batch[NOISED] for batch in batches], tuple(sorted(blocks)))

    def targets(
        self,
        teacher: Prediction | None,
        batches: dict[str, Batch],
        networks: Networks,
        schedule: FlowSchedule,
    ) -> list[Any]:
        """Return what each term matches in a micro-step, without gradient.

        Args:
            teacher: from `predictions`.
            batches: by kind of states.
            networks: those of the run.
        """
        with torch.no_grad():
            return [term.target(teacher, batches[term.states], networks, schedule) for term in self.terms]

    def losses(
        self,
        predictions: dict[str, Prediction],
        targets: list[Any],
        batches: dict[str, Batch],
    ) -> Tensor:
        """Compute loss_TB of each term T, unweighted, float32; predictions and batches by kind of states."""
        matched = zip(self.terms, targets, strict=True)
        return torch.stack(
            [t.loss(predictions[t.states], target, batches[t.states]) for t, target in matched]
        )

    def watched(self, targets: list[Any]) -> dict[str, Tensor]:
        """Return numbers_B by name that show whether training goes well, after `losses`."""
        matched = zip(self.terms, targets, strict=True)
        return {key: value for term, target in matched for key, value in term.watched(target).items()}

    @property
    def critic(self) -> Critic | None:
        """Settings of the critic, if a term needs one."""
        return next((critic for term in self.terms if (critic := term.critic)), None)

    @property
    def roles(self) -> tuple[str, ...]:
        """Role of the network that each update of a step is for."""
        return (CRITIC,) * (self.critic.updates if self.critic else 0) + (STUDENT,)

    @property
    def needs_latents(self) -> bool:
        """True if a loss uses cached latents."""
        return any(term.needs_latents for term in self.terms)

    def student_calls(self, schedule: FlowSchedule) -> float:
        """Mean number of the student's forward passes without gradient for a micro-step of each update."""
        return sum(term.student_calls(schedule) for term in self.terms)

    def total(self, losses: Tensor | list[float]) -> Tensor | float:
        """Return the weighted sum: loss_B of loss_TB, or a number of one for each term."""
        return sum(term.weight * loss for term, loss in zip(self.terms, losses, strict=True))


def read_objective(given: str | dict[str, Any] | list[str | dict[str, Any]]) -> Objective:
    """Read a recipe's "objective": a name, {"name": ..., settings}, or a list of these to be summed.

    Raises:
        ConfigError: with all problems at once.
    """
    several = isinstance(given, list)
    terms: list[Term] = []
    problems = [] if given != [] else [problem("recipe", "objective", given, _choice(given))]
    for i, one in enumerate(given if several else [given]):
        where = f"objective[{i}]" if several else "objective"
        settings = {"name": one} if isinstance(one, str) else dict(one)
        name = settings.pop("name", "velocity")
        if not isinstance(name, str) or name not in OBJECTIVES:
            problems.append(problem("recipe", where, name, _choice(name)))
            continue
        wrong, good = check("recipe", settings, types_of(OBJECTIVES[name]), f"{where}.")
        terms.append(OBJECTIVES[name](**good))
        problems += wrong or terms[-1].problems(where)
    names = [term.name for term in terms]
    problems += [f"recipe: `objective` names {n} twice. Keep one." for n in OBJECTIVES if names.count(n) > 1]
    steps = {term.name: n for term in terms if (n := term.sampling_steps)}
    if len(terms) > 1 and (one := next((term for term in terms if term.trained_expert), None)):
        remedy = "Write it alone, or without `expert`."
        problems.append(f"recipe: `objective` sums {one.name} of one `expert` with other terms. {remedy}")
    samplers = {term.name: term.few_step_sampler for term in terms if term.sampling_steps}
    if len(set(samplers.values())) > 1:
        listed = " and ".join(f"{name} for {sampler}" for name, sampler in samplers.items())
        remedy = "Take `edges` of consistency with euler, and with renoise neither `edges` nor `steps`."
        problems.append(f"recipe: `objective` trains {listed}. {remedy}")
    if len(set(steps.values())) > 1:
        listed = " and ".join(f"{name} for {n}" for name, n in steps.items())
        problems.append(f"recipe: `objective` trains {listed} sampling steps. Write one number in both.")
    if problems:
        raise ConfigError(*problems)
    return Objective(tuple(terms))


def _choice(name: object) -> str:
    return f"Write one of: {', '.join(OBJECTIVES)}.{nearest(name, OBJECTIVES)}"
