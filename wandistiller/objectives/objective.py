"""The training objective: a weighted sum of terms, each a loss per sample, as a recipe asks for it."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wandistiller.batch import STUDENT, State
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import FLOW_MAP, FlowSchedule
from wandistiller.objectives.base import TO_DATA, Role, RunFacts, Term
from wandistiller.objectives.flow_map import unfit
from wandistiller.objectives.script import Loss, Losses, Question, joined
from wandistiller.utils.errors import RECIPE, ConfigError, Problem, nearest, problem
from wandistiller.utils.registry import classes_in
from wandistiller.utils.validation import check, types_of


@dataclass(frozen=True, slots=True)
class Objective:
    """A weighted sum of terms."""

    terms: tuple[Term, ...]

    def __str__(self) -> str:
        """The sum for people and for a checkpoint's identity: `velocity + 0.1 feature(blocks=[1, 3])`."""
        return " + ".join(map(str, self.terms))

    @property
    def kinds(self) -> list[str]:
        """Kinds of states that the terms need, each once; noised ones first, samples last."""
        return list(dict.fromkeys(term.states for term in sorted(self.terms, key=_noised_first)))

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.terms)

    @property
    def sampling_steps(self) -> int | None:
        """Number of steps that the student is trained to sample in; None: as many as its teacher."""
        return next((n for term in self.terms if (n := term.aim.steps)), None)

    @property
    def few_step_sampler(self) -> str | None:
        return next((term.aim.sampler for term in self.terms if term.aim.steps), None)

    @property
    def trained_expert(self) -> Expert | None:
        return next((expert for term in self.terms if (expert := term.aim.expert)), None)

    @property
    def student_blocks(self) -> list[int]:
        """Student blocks whose hidden states are compared, each once; final after `for_student`."""
        return list(dict.fromkeys(k for term in self.terms for k, _ in term.matched_blocks))

    def combined_problems(self, run: RunFacts) -> list[str]:
        """List the settings that do not go with the rest of a run."""
        keys = [f"objective[{i}]" for i in range(len(self.terms))] if len(self.terms) > 1 else ["objective"]
        named = zip(keys, self.terms, strict=True)
        problems = [problem for key, term in named for problem in term.combined_problems(key, run)]
        return problems + (unfit(run) if self.few_step_sampler == FLOW_MAP else [])

    def for_student(self, lineage: list[int]) -> "Objective":
        """Return the objective of a student whose blocks stand for these blocks of the teacher."""
        return Objective(tuple(term.for_student(lineage) for term in self.terms))

    def draw(self, role: str, source: MicroBatches, update: int, micro: int) -> dict[str, State]:
        """Return this rank's samples of a micro-step of a role's update, by kind of states."""
        states: dict[str, State] = {}
        for term in sorted(self._terms(role), key=_noised_first):
            if term.states not in states:
                states |= term.draw(role, source, update, micro)
        return states

    def rolls_out(self, role: str) -> bool:
        """Return whether the student samples for a role's update."""
        return any(term.samples for term in self._terms(role))

    def begun(self, role: str, update: int, schedule: FlowSchedule) -> int:
        """Return the update whose prompts the samples of a role's update have."""
        return min(term.begun(role, update, schedule) for term in self._terms(role))

    def script(
        self,
        role: str,
        states: dict[str, State],
        schedule: FlowSchedule,
        carried_BCFHW: Tensor | None = None,
    ) -> Generator[Question | list[Question], Any, Losses]:
        """Play a micro-step of a role's update, for all terms of the role; return a loss for all that learn.

        Args:
            states: from `draw`, by kind.
            carried_BCFHW: states to go on from, which the loss of the role's last update had.
        """
        for term in self._terms(role):
            states = yield from term.roll_out(role, states, schedule, carried_BCFHW)
        terms = sorted(self._terms(role), key=_noised_first)
        results = yield from joined([term.script(role, states, schedule) for term in terms])
        by_name, losses = dict(zip([term.name for term in terms], results, strict=True)), {}
        for term in self._terms(role):
            result = by_name[term.name]
            for name, loss in (result if isinstance(result, dict) else {role: result}).items():
                losses.setdefault(name, []).append(loss)
        return {name: Loss.of_terms(of_role) for name, of_role in losses.items()}

    def weights(self, role: str) -> dict[str, float]:
        if role == STUDENT:
            return {term.name: term.weight for term in self.terms}
        return self.others[role].losses

    def total(self, losses: Tensor | list[float], role: str = STUDENT) -> Tensor | float:
        """Return the weighted sum: loss_B of loss_TB, or a number of one for each loss of the role."""
        return sum(w * loss for w, loss in zip(self.weights(role).values(), losses, strict=True))

    def total_at_first(self, losses: Tensor, role: str = STUDENT) -> Tensor:
        """Return the part of `total` at states of the first kind, to whose sigma it belongs."""
        if role != STUDENT:
            return self.total(losses, role)
        at_first = [term.weight * (term.states == self.kinds[0]) for term in self.terms]
        return sum(w * loss for w, loss in zip(at_first, losses, strict=True))

    @property
    def others(self) -> dict[str, Role]:
        """Networks that are trained beside the student, by role."""
        return {role.name: role for term in self.terms for role in term.roles}

    def _terms(self, role: str) -> list[Term]:
        """Return the terms that have a part in a role's updates."""
        return [t for t in self.terms if role == STUDENT or any(role == other.name for other in t.roles)]

    @property
    def updates(self) -> tuple[str, ...]:
        """Role of the network that each update of a step is for; the student's is the last.

        Those of other roles that are made with it are not counted again."""
        others = self.others.items()
        return tuple(name for name, role in others for _ in range(role.updates_alone)) + (STUDENT,)

    def first_update(self, step: int) -> int:
        """Return the number of a step's first update, both counted from 0 over the run."""
        return step * len(self.updates)

    def role_of(self, update: int) -> str:
        """Return the role of the network that an update, counted from 0 over the run, is for."""
        return self.updates[update % len(self.updates)]

    def needs_latents(self, role: str) -> bool:
        """Return whether an update of a role reads cached latents."""
        if role != STUDENT:
            return self.others[role].has_heads
        return any(not term.samples for term in self.terms)


def _noised_first(term: Term) -> tuple[bool, str]:
    """Return by what terms are put in order: those at noised states first, those at samples last."""
    return term.samples, term.states


OBJECTIVES = classes_in("wandistiller.objectives", Term)
"""Every term, by the name of its file."""


def read_objective(value: str | dict[str, Any] | list[str | dict[str, Any]]) -> Objective:
    """Read a recipe's "objective": a name, {"name": ..., settings}, or a list of these to be summed.

    Raises:
        ConfigError: with all problems at once.
    """
    several = isinstance(value, list)
    terms: list[Term] = []
    problems = [] if value != [] else [problem("recipe", "objective", value, _choice(value))]
    for i, entry in enumerate(value if several else [value]):
        where = f"objective[{i}]" if several else "objective"
        settings = {"name": entry} if isinstance(entry, str) else dict(entry)
        name = settings.pop("name", "velocity")
        if not isinstance(name, str) or name not in OBJECTIVES:
            problems.append(problem("recipe", where, name, _choice(name)))
            continue
        wrong, good = check("recipe", settings, types_of(OBJECTIVES[name]), f"{where}.")
        terms.append(OBJECTIVES[name](**good))
        problems += wrong or terms[-1].problems(where)
    names = [term.name for term in terms]
    texts = [f"names {name} twice. Keep one." for name in OBJECTIVES if names.count(name) > 1]
    steps = {term.name: n for term in terms if (n := term.aim.steps)}
    of_expert = [term.name for term in terms if term.aim.expert]
    if len(terms) > 1 and of_expert:
        remedy = "Write it alone, or without `expert`."
        texts.append(f"sums {of_expert[0]} of one `expert` with other terms. {remedy}")
    destinations = {term.name: words for term in terms if (words := term.aim.destination)}
    if len(set(destinations.values())) > 1:
        listed = ", and ".join(f"{name}, which leads {words}" for name, words in destinations.items())
        remedy = (
            "The student would learn a mean of both. Write them as `stages`; dmd2 and consistency go "
            'together with "sampler" "renoise" of dmd2, and neither `edges` nor `steps` of consistency.'
        )
        texts.append(f"sums {listed}. {remedy}")
    elif TO_DATA in destinations.values() and not steps:
        text = f"leads {TO_DATA}, and does not say in how many steps the student then samples"
        texts.append(f"{text}. Write `edges` or `steps` of consistency, such as 4.")
    if len(set(steps.values())) > 1:
        listed = " and ".join(f"{name} for {n}" for name, n in steps.items())
        texts.append(f"trains {listed} sampling steps. Write one number in both.")
    problems += [Problem(f"`objective` {text}", RECIPE, "objective") for text in texts]
    if problems:
        raise ConfigError(*problems)
    return Objective(tuple(terms))


def _choice(name: object) -> str:
    return f"Write one of: {', '.join(OBJECTIVES)}.{nearest(name, OBJECTIVES)}"
