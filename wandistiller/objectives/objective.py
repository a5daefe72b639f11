"""The training objective: a weighted sum of terms, each a loss per sample at states of one kind."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.base import Role, RunFacts, Term
from wandistiller.objectives.script import Ask, Loss, Losses, Question, joined


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
        return [problem for key, term in named for problem in term.combined_problems(key, run)]

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

    def roll_out(
        self, role: str, states: dict[str, State], schedule: FlowSchedule
    ) -> Generator[Ask, Prediction, dict[str, State]]:
        """Sample with the student from what `draw` drew, for all terms of the role."""
        for term in self._terms(role):
            states = yield from term.roll_out(role, states, schedule)
        return states

    def script(
        self, role: str, states: dict[str, State], schedule: FlowSchedule
    ) -> Generator[list[Question], list[Any], Losses]:
        """Play a micro-step of a role's update, for all terms of the role; return a loss for all that learn.

        Args:
            states: from `roll_out`, by kind.
        """
        terms = sorted(self._terms(role), key=_noised_first)
        results = yield from joined([term.script(role, states, schedule) for term in terms])
        by_name, losses = {term.name: one for term, one in zip(terms, results, strict=True)}, {}
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
        before = {name: role.updates - role.is_shared for name, role in self.others.items()}
        return tuple(name for name, number in before.items() for _ in range(number)) + (STUDENT,)

    @property
    def warmup(self) -> tuple[str, ...]:
        """Role of the network that each update before the first step is for."""
        return tuple(name for name, role in self.others.items() for _ in range(role.warmup))

    def first_update(self, step: int) -> int:
        """Return the number of a step's first update, both counted from 0 over the run."""
        return len(self.warmup) + step * len(self.updates)

    def role_of(self, update: int) -> str:
        """Return the role of the network that an update, counted from 0 over the run, is for."""
        place = update - len(self.warmup)
        return self.warmup[update] if place < 0 else self.updates[place % len(self.updates)]

    def needs_latents(self, role: str) -> bool:
        """Return whether an update of a role reads cached latents."""
        return (
            any(not term.samples for term in self.terms) if role == STUDENT else self.others[role].has_heads
        )


def _noised_first(term: Term) -> tuple[bool, str]:
    """Return by what terms are put in order: those at noised states first, those at samples last."""
    return term.samples, term.states
