"""Updates of a step: each is one network's, with a forward and a backward pass for its own loss."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wandistiller.batch import CRITIC, GENERATED, NOISED, STUDENT, Batch, GeneratedBatch, Prediction
from wandistiller.config.job import Job
from wandistiller.data.micro_batches import MicroBatches
from wandistiller.distributed import sequence
from wandistiller.distributed.device import on_accelerator
from wandistiller.objectives.base import Ask, Networks, mean_square
from wandistiller.objectives.dmd2 import heads_loss
from wandistiller.simulation import judged, simulate
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher
from wandistiller.teacher.sweep import swept
from wandistiller.teacher.teacher_json import read_placement
from wandistiller.training.ahead import worker
from wandistiller.training.step_result import READING, MicroStepResult
from wandistiller.utils.logging import activity

TEACHER = "the teacher's forward pass"
"""An activity of a step."""
Asked = tuple[list[dict[str, Batch]], list[Prediction | None]]
"""Samples of micro-steps by kind of states, and the teacher's predictions for them."""
Reads = Callable[[int, int], dict[str, Batch]]
"""This rank's samples of an update and a micro-step by kind of states, `Turn.read` of that update's turn."""


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Return `loss`; if it is not finite, make its gradients non-finite too: every engine skips the step.

    This holds on all ranks, whichever had the loss, and for a loss that overflowed in a square while its
    gradient did not. It needs neither a collective nor a transfer from the device.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


class Turn(ABC):
    """Updates of the network of one role."""

    def __init__(
        self, job: Job, batches: MicroBatches, learners: dict[str, Learner], teacher: Teacher | None
    ):
        self.job, self.batches, self.learners, self.teacher = job, batches, learners, teacher
        self.student = learners[STUDENT]

    @property
    @abstractmethod
    def learner(self) -> Learner:
        """The network that learns."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of the rows of loss_TB."""

    @abstractmethod
    def read(self, update: int, micro: int) -> dict[str, Batch]:
        """Return this rank's samples of a micro-step by kind of states."""

    @abstractmethod
    def micro_steps(self, update: int, reads: Reads, following: int | None = None) -> list[MicroStepResult]:
        """Make all forward and backward passes on this rank's samples of an update, counted from 0.

        Args:
            reads: where the samples come from.
            following: the turn's next update, if the teacher may already predict for it.
        """

    @abstractmethod
    def total(self, losses: Tensor | list[float]) -> Tensor | float:
        """Return the loss of the network: the weighted sum over the rows of loss_TB."""

    def learn(self, batch: Batch, loss_TB: Tensor, watched: dict[str, Tensor]) -> MicroStepResult:
        """Add the gradient; on the last micro-step of an update the weights change."""
        with activity(f"the {self.role}'s backward pass"):
            loss = self.total(loss_TB).mean()
            self.learner.backward(batch.expert, propagate_nonfinite(loss))
        with activity("the optimizer's step"):
            self.learner.step(batch.expert)
        return MicroStepResult(loss_TB.detach(), batch.sigma_B, batch.expert, watched)

    @property
    def role(self) -> str:
        """`student` or `critic`."""
        return next(role for role, learner in self.learners.items() if learner is self.learner)


class StudentTurn(Turn):
    """The student's updates, by the run's objective."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._worker = worker("teacher")
        self._begun: dict[int, Future[list[Asked]]] = {}
        """What was asked for a later update, in the order of its micro-steps."""

    @property
    def learner(self) -> Learner:
        return self.student

    @property
    def names(self) -> list[str]:
        return [term.name for term in self.job.objective.terms]

    def total(self, losses: Tensor | list[float]) -> Tensor | float:
        return self.job.objective.total(losses)

    def read(self, update: int, micro: int) -> dict[str, Batch]:
        return self.batches.batch(update, micro)

    def micro_steps(self, update: int, reads: Reads, following: int | None = None) -> list[MicroStepResult]:
        asked = self._asked_ahead(update)
        ahead = self._works_ahead and following is not None
        self.learner.while_updating(partial(self._begin, following, reads) if ahead else None)
        results = []
        for group in self._groups:
            results += self._together(*(asked.pop(0) if asked else self._ask(update, group, reads)))
        return results

    def _together(
        self, batches: list[dict[str, Batch]], teacher: list[Prediction | None]
    ) -> list[MicroStepResult]:
        """Make micro-steps whose samples went through the teacher together."""
        of_each = zip(batches, teacher, self._at_samples(batches), strict=True)
        return [self._micro_step(*of_one) for of_one in of_each]

    def _asked_ahead(self, update: int) -> list[Asked]:
        if not (begun := self._begun.pop(update, None)):
            return []
        with activity(TEACHER):
            return begun.result()

    @property
    def _groups(self) -> list[range]:
        """Micro-steps of an update whose samples go through the teacher together."""
        number, together = self.job.batch.accumulation, swept(self.job)
        return [range(first, min(first + together, number)) for first in range(0, number, together)]

    def _ask(self, update: int, group: range, reads: Reads) -> Asked:
        """Read the samples of micro-steps that go through the teacher together, and ask it about them."""
        with activity(READING):
            batches = [reads(update, micro) for micro in group]
        if self._samples:
            with activity("the student's sampling"):
                for of_kinds in batches:
                    of_kinds[GENERATED] = self._simulated(of_kinds[GENERATED])
        with activity(TEACHER):
            return batches, self.job.matched_objective.predictions(self.teacher, batches)

    @property
    def _works_ahead(self) -> bool:
        """True if the teacher predicts for the next update while the optimizer updates the weights.

        Its noise is keyed and its weights are frozen, so that it does not depend on the student, unless it
        is asked about the student's samples. Ranks that share a sequence exchange parts of it in one order.
        """
        ds, on_gpu = self.job.teacher_ds, on_accelerator()
        depends = self._samples or not self.job.objective.asks_at_noised or sequence.degree() > 1
        return not depends and read_placement(ds).works_ahead(ds, on_gpu=on_gpu)

    def _begin(self, update: int, reads: Reads) -> None:
        """Read an update's samples, and ask the teacher about them, in a thread.

        Of hidden states to compare, which are large, only those of the first micro-steps.
        """
        groups = self._groups[:1] if self.job.matched_objective.student_blocks else self._groups

        def ask(group: range) -> Asked:
            batches = [reads(update, micro) for micro in group]
            return batches, self.job.matched_objective.predictions(self.teacher, batches)

        self._begun[update] = self._worker.submit(lambda: [*map(ask, groups)])

    def _simulated(self, batch: GeneratedBatch) -> GeneratedBatch:
        return simulate(batch, self.student.velocity, self.job.schedule.few)

    @property
    def _samples(self) -> bool:
        """True if the student learns from its own samples."""
        return GENERATED in self.job.objective.states

    def _at_samples(self, batches: list[dict[str, Batch]]) -> list[Ask | None]:
        """Return the teacher's velocity at the student's samples of each micro-step, if several are known.

        To know them early costs a forward pass of the student, and saves the teacher's weights a way to the
        device in each micro-step.
        """
        if not self._samples or not self.teacher or len(batches) == 1:
            return [None] * len(batches)
        with activity(TEACHER):
            with torch.no_grad():  # of all kinds of states at once, as in the pass that learns
                samples = [judged(b[GENERATED], self.student.predict(b)[GENERATED].v_BCFHW) for b in batches]
            return [lambda _, p=p: p.v_BCFHW for p in self.teacher.predict_all(samples, ())]

    def _micro_step(
        self, batches: dict[str, Batch], teacher: Prediction | None, at_samples: Ask | None
    ) -> MicroStepResult:
        objective, networks = self.job.matched_objective, self._networks
        if at_samples:
            networks = networks._replace(teacher=at_samples)
        first = next(iter(batches.values()))
        with activity("the student's forward pass"):
            targets = objective.targets(teacher, batches, networks, self.job.schedule)
            predictions = self.student.predict(batches)
            loss_TB = objective.losses(predictions, targets, batches)
        return self.learn(first, loss_TB, objective.watched(targets))

    @property
    def _networks(self) -> Networks:
        critic = self.learners.get(CRITIC)
        return Networks(
            self.student.velocity,
            self.teacher.velocity if self.teacher else None,
            critic.velocity if critic else None,
            critic.slope if critic else None,
        )


REAL, HEADS = "real", "heads"
"""Kind of states: cached latents with noise. Row of the losses of the critic's heads."""
HEADS_WEIGHT = 0.01
"""Of the heads' loss in the critic's: it hardly moves the critic itself. Source: DMD2's settings for SDXL."""


class CriticTurn(Turn):
    """The critic's updates, by flow matching on samples of the student's; its heads learn what is real."""

    @property
    def names(self) -> list[str]:
        return [CRITIC, HEADS] if self.job.objective.critic.judges_reality else [CRITIC]

    @property
    def learner(self) -> Learner:
        return self.learners[CRITIC]

    def total(self, losses: Tensor | list[float]) -> Tensor | float:
        return losses[0] + HEADS_WEIGHT * losses[1] if HEADS in self.names else losses[0]

    def read(self, update: int, micro: int) -> dict[str, Batch]:
        batch = self.batches.of_student(update, micro)
        real = {REAL: self.batches.real(update, micro, batch.judged)} if HEADS in self.names else {}
        return {GENERATED: batch, **real}

    def micro_steps(self, update: int, reads: Reads, following: int | None = None) -> list[MicroStepResult]:
        number = self.job.batch.accumulation
        return [self._micro_step(partial(reads, update, micro)) for micro in range(number)]

    def _micro_step(self, read: Callable[[], dict[str, Batch]]) -> MicroStepResult:
        with activity(READING):
            batches = read()
        with activity("the student's sampling"), torch.no_grad():
            batch = simulate(batches.pop(GENERATED), self.student.velocity, self.job.schedule.few)
            states = judged(batch, self.student.velocity(batch))
        with activity("the critic's forward pass"):
            fake, *real = self.learner.predict({NOISED: states, **batches}).values()
            losses = [mean_square(fake.v_BCFHW - states.target_BCFHW)]
            loss_TB = torch.stack(losses + [heads_loss(fake, one) for one in real])
        return self.learn(states, loss_TB, {})


TURNS = {STUDENT: StudentTurn, CRITIC: CriticTurn}
