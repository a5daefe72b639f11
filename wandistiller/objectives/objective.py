"""The training objective: a weighted sum of terms, each a loss per sample at states of one kind."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from wandistiller.batch import NOISED, STUDENT, Prediction, State
from wandistiller.data.micro_batches import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.base import Limit, Role, Term
from wandistiller.objectives.script import Ask, Loss, Script, joined


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
        return list(dict.fromkeys(term.states for term in sorted(self.terms, key=self._order)))

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.terms)

    @property
    def predicts_at_noised(self) -> bool:
        """True if a term needs the teacher's prediction at noised states; one call is for all such terms."""
        return any(term.needs_teacher and term.states == NOISED for term in self.terms)

    @property
    def sampling_steps(self) -> int | None:
        """Number of steps that the student is trained to sample in; None: as many as its teacher."""
        return next((n for term in self.terms if (n := term.sampling_steps)), None)

    @property
    def few_step_sampler(self) -> str | None:
        return next((term.few_step_sampler for term in self.terms if term.sampling_steps), None)

    @property
    def trained_expert(self) -> Expert | None:
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

    def draw(self, role: str, source: MicroBatches, update: int, micro: int) -> dict[str, State]:
        """Return this rank's samples of a micro-step of a role's update, by kind of states."""
        if role != STUDENT:
            return self._owner(role).draw(role, source, update, micro)
        first = {kind: next(t for t in self.terms if t.states == kind) for kind in self.kinds}
        return {kind: term.draw(role, source, update, micro)[kind] for kind, term in first.items()}

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

    def script(self, role: str, states: dict[str, State], schedule: FlowSchedule) -> Script:
        """Play a micro-step of a role's update, for all terms of the role.

        Args:
            states: from `roll_out`, by kind.
        """
        terms = sorted(self._terms(role), key=self._order)
        scripts = [term.script(role, states, schedule) for term in terms]
        if len(scripts) == 1:
            return (yield from scripts[0])
        losses = yield from joined(scripts)
        of_terms = [losses[terms.index(term)] for term in self.terms]
        numbers = {name: number_B for loss in of_terms for name, number_B in loss.numbers.items()}
        return Loss(torch.cat([loss.rows_TB for loss in of_terms]), numbers)

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

    @property
    def limits(self) -> list[Limit]:
        """When numbers of the terms mean that training fails."""
        return [limit for term in self.terms for limit in term.limits]

    @staticmethod
    def _order(term: Term) -> tuple[bool, str]:
        return term.samples, term.states

    def _terms(self, role: str) -> list[Term]:
        return list(self.terms) if role == STUDENT else [self._owner(role)]

    def _owner(self, role: str) -> Term:
        return next(term for term in self.terms if role in {r.name for r in term.roles})

    @property
    def updates(self) -> tuple[str, ...]:
        """Role of the network that each update of a step is for; the student's is the last."""
        return tuple(name for name, role in self.others.items() for _ in range(role.updates)) + (STUDENT,)

    @property
    def warmup(self) -> tuple[str, ...]:
        """Role of the network that each update before the first step is for."""
        return tuple(name for name, role in self.others.items() for _ in range(role.warmup))

    def with_warmup(self) -> "Objective":
        """Return the objective whose every step has the updates that come before the first one too."""
        return Objective(tuple(term.with_warmup() for term in self.terms))

    def first_update(self, step: int) -> int:
        """Return the number of a step's first update, both counted from 0 over the run."""
        return len(self.warmup) + step * len(self.updates)

    def role_of(self, update: int) -> str:
        """Return the role of the network that an update, counted from 0 over the run, is for."""
        place = update - len(self.warmup)
        return self.warmup[update] if place < 0 else self.updates[place % len(self.updates)]

    def needs_latents(self, role: str) -> bool:
        """Return whether an update of a role reads cached latents."""
        return any(term.needs_latents(role) for term in self._terms(role))
