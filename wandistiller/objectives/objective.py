"""The training objective: a weighted sum of terms, each a loss per sample at states of one kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wandistiller.batch import NOISED, STUDENT, Prediction, State
from wandistiller.data.micro_batches import MicroBatches
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.base import Ask, Judged, Limit, Networks, Role, Term
from wandistiller.teacher.base import Teacher


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
        return list(dict.fromkeys(t.states for t in sorted(self.terms, key=lambda t: (t.samples, t.states))))

    @property
    def needs_teacher(self) -> bool:
        return any(term.needs_teacher for term in self.terms)

    @property
    def predicts_at_noised(self) -> bool:
        """True if a term needs the teacher's prediction at noised states; one call is for all such terms."""
        return any(term.needs_teacher and term.states == NOISED for term in self.terms)

    @property
    def calls_at_samples(self) -> int:
        """Number of calls of the teacher at the student's own samples, in a micro-step of its update."""
        return sum(term.needs_teacher and term.samples for term in self.terms)

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
        self, role: str, batches: dict[str, State], student: Ask, schedule: FlowSchedule
    ) -> dict[str, State]:
        """Return what `draw` drew, with the states to which the student's own sampling leads."""
        with torch.no_grad():
            for term in self._terms(role):
                batches = term.roll_out(role, batches, student, schedule)
        return batches

    def predictions(
        self, teacher: Teacher | None, batches: list[dict[str, State]]
    ) -> list[Prediction | None]:
        """Return the teacher's prediction at the noised states of each micro-step, if a term needs it.

        Args:
            batches: by kind of states, of each micro-step.
        """
        if not self.predicts_at_noised:
            return [None] * len(batches)
        blocks = {m for term in self.terms for _, m in term.matched_blocks}
        return teacher.predict_all([batch[NOISED] for batch in batches], tuple(sorted(blocks)))

    @property
    def judges(self) -> list[str]:
        """Roles whose networks are called at the student's samples beside the teacher."""
        return [role for term in self.terms if term.samples for role in term.judges]

    def sampled(self, predictions: dict[str, Prediction], batches: dict[str, State]) -> list[State]:
        """Return the student's samples at which the teacher is called, of each term with some.

        Args:
            predictions: the student's, by kind of states.
        """
        with torch.no_grad():
            return [
                term.sampled(predictions[term.states].v_BCFHW.detach(), batches[term.states])
                for term in self.terms
                if term.samples
            ]

    def targets(
        self,
        teacher: Prediction | None,
        batches: dict[str, State],
        networks: Networks,
        schedule: FlowSchedule,
    ) -> list[Any]:
        """Return what each term matches in a micro-step, without gradient; None where samples decide.

        Args:
            teacher: from `predictions`.
        """
        with torch.no_grad():
            return [
                None if term.samples else term.target(teacher, batches[term.states], networks, schedule)
                for term in self.terms
            ]

    def losses(
        self,
        predictions: dict[str, Prediction],
        targets: list[Any],
        batches: dict[str, State],
        networks: Networks,
        judge: Callable[[list[State]], list[Judged]] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the student's loss_TB of each term T, unweighted, float32, and numbers_B for metrics.

        Args:
            predictions: the student's, by kind of states.
            judge: returns velocities at samples, of the teacher and of `judges`.
        """
        with torch.no_grad():
            sampled = self.sampled(predictions, batches)
            at_samples = zip(sampled, judge(sampled) if sampled else [], strict=True)
            targets = [
                term.target_of_samples(*next(at_samples), networks) if term.samples else target
                for term, target in zip(self.terms, targets, strict=True)
            ]
        losses, numbers = [], {}
        for term, target in zip(self.terms, targets, strict=True):
            batch = batches[term.states]
            losses.append(term.loss(predictions[term.states], target, batch))
            numbers |= term.numbers(target, batch)
        return torch.stack(losses), numbers

    def losses_of(self, role: str, predictions: dict[str, Prediction], batches: dict[str, State]) -> Tensor:
        """Compute the unweighted losses of one of `others`, in the order of their names."""
        return self._owner(role).losses_of(role, predictions, batches)

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

    def student_calls(self, schedule: FlowSchedule) -> float:
        """Mean number of the student's forward passes without gradient for a micro-step of each update."""
        return sum(term.student_calls(schedule) for term in self.terms)
