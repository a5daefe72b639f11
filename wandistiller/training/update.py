"""Updates of a step, each of one role's network: samples, forward and backward passes for its own loss."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.config.job import Job
from wandistiller.config.sweeps import rolled_out, swept
from wandistiller.data.micro_batches import MicroBatches
from wandistiller.distributed.device import make_current, on_accelerator
from wandistiller.network.sweep import block_by_block
from wandistiller.objectives.script import TEACHER, Ask, Play, Question, played
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher, local_modules
from wandistiller.training.step_result import READING, MicroStepResult
from wandistiller.utils.logging import activity

PREDICTING = "the teacher's forward pass"
T = TypeVar("T")
Reads = Callable[[int, int], dict[str, State]]
"""This rank's samples of an update and a micro-step by kind of states."""


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Return `loss`; if it is not finite, make its gradients non-finite too: every engine skips the step.

    This holds on all ranks, whichever had the loss, and for a loss that overflowed in a square while its
    gradient did not. It needs neither a collective nor a transfer from the device.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


class Update:
    """Updates of one role's network by the run's objective."""

    def __init__(
        self,
        role: str,
        job: Job,
        batches: MicroBatches,
        learners: dict[str, Learner],
        teacher: Teacher | None,
    ):
        self.role, self.job, self.teacher = role, job, teacher
        self.objective = job.objective.for_student(job.stands_for)
        self.learner, self.student = learners[role], learners[STUDENT]
        self._batches = batches
        self._learners = learners
        self.names = list(self.objective.weights(role))
        """Of the rows of loss_TB."""
        self._worker = worker("teacher")
        self._begun: dict[int, Future[list[list[Play]]]] = {}
        """Scripts of a later update, which the teacher has answered, in the order of its micro-steps."""

    def total(self, losses: Tensor | list[float]) -> Tensor | float:
        """Return the loss of the network: the weighted sum over the rows of loss_TB."""
        return self.objective.total(losses, self.role)

    def total_at_first(self, losses: Tensor) -> Tensor:
        """Return the part of `total` that belongs to the results' sigma."""
        return self.objective.total_at_first(losses, self.role)

    def read(self, update: int, micro: int) -> dict[str, State]:
        """Return this rank's samples of a micro-step by kind of states."""
        return self.objective.draw(self.role, self._batches, update, micro)

    def micro_steps(self, update: int, reads: Reads, following: int | None = None) -> list[MicroStepResult]:
        """Make all forward and backward passes on this rank's samples of an update, counted from 0.

        Args:
            following: the role's next update, if the teacher may already predict for it.
        """
        begun = self._begun_before(update)
        ahead = self._works_ahead and following is not None
        self.learner.while_updating(partial(self._begin, following, reads) if ahead else None)
        results = []
        for group in self._groups:
            results += self._learn(begun.pop(0) if begun else self._read(update, group, reads))
        return results

    def _plays(self, update: int, group: range, reads: Reads) -> list[Play]:
        """Read the samples of micro-steps, and begin their scripts."""
        schedule, samples = self.job.schedule, [reads(update, micro) for micro in group]
        return [Play(partial(self.objective.script, self.role, of_one, schedule)) for of_one in samples]

    def _read(self, update: int, group: range, reads: Reads) -> list[Play]:
        with activity(READING):
            return self._plays(update, group, reads)

    def _learn(self, plays: list[Play]) -> list[MicroStepResult]:
        """Make the micro-steps of a group; nothing refers to their samples when the next ones are read."""
        with activity(PREDICTING):
            self._ask(plays, lambda ask: True)
            known = self._preview(plays)
        return [self._micro_step(play, outputs) for play, outputs in zip(plays, known, strict=True)]

    def _begun_before(self, update: int) -> list[list[Play]]:
        if not (begun := self._begun.pop(update, None)):
            return []
        with activity(PREDICTING):
            return begun.result()

    @property
    def _groups(self) -> list[range]:
        """Micro-steps of an update whose samples go through the teacher together."""
        number, together = self.job.batch.accumulation, swept(self.job) if self.role == STUDENT else 1
        return [range(first, min(first + together, number)) for first in range(0, number, together)]

    @property
    def _works_ahead(self) -> bool:
        """True if the teacher predicts for the next update while the optimizer updates the weights.

        Its noise is keyed and its weights are frozen, so that it does not depend on the student, unless it
        predicts at the student's samples. Ranks that share a sequence exchange parts of it in one order.
        """
        if self.role != STUDENT or not self.objective.predicts_at_noised or self.objective.rolls_out(STUDENT):
            return False
        return self.student.ranks.degree == 1 and self.job.teacher.works_ahead(on_gpu=on_accelerator())

    def _begin(self, update: int, reads: Reads) -> None:
        """Read an update's samples, and let the teacher predict, in a thread.

        Of hidden states to compare, which are large, only those of the first micro-steps.
        """
        groups = self._groups[:1] if self.objective.student_blocks else self._groups

        def begin(group: range) -> list[Play]:
            plays = self._plays(update, group, reads)
            self._ask(plays, lambda ask: ask.role == TEACHER)
            return plays

        self._begun[update] = self._worker.submit(lambda: [*map(begin, groups)])

    def _ask(self, plays: list[Play], may: Callable[[Ask], bool]) -> None:
        """Go on with scripts up to the pass that learns, as far as `may` is true of what they ask."""
        while asking := [play for play in plays if play.asks and all(map(may, play.questions))]:
            outputs = self._outputs([play.questions for play in asking])
            for play, of_play in zip(asking, outputs, strict=True):
                play.answer(of_play)

    def _preview(self, plays: list[Play]) -> list[list[list[Prediction]]]:
        """Return outputs for what scripts ask after the pass that learns, by rounds, where they are known.

        To know them early costs a forward pass of the student, and saves the teacher's weights a way to the
        device in each micro-step.
        """
        known: list[list[list[Prediction]]] = [[] for _ in plays]
        if self.role != STUDENT or not self.objective.rolls_out(STUDENT) or len(plays) == 1:
            return known
        previews = [play.again() for play in plays]
        with torch.no_grad():
            # of all kinds of states at once, as in the pass that learns
            predicted = self._together([partial(self._predict, preview) for preview in previews])
        for preview, of_one in zip(previews, predicted, strict=True):
            preview.answer(of_one)
        while asking := [number for number, preview in enumerate(previews) if preview.asks]:
            outputs = self._outputs([previews[number].questions for number in asking])
            for number, of_one in zip(asking, outputs, strict=True):
                known[number].append(of_one)
                previews[number].answer(of_one)
        return known

    def _predict(self, play: Play) -> list[Prediction]:
        """Make the pass that learns, one for all states that the script learns at."""
        states = {number: question.state for number, question in enumerate(play.questions)}
        return [*self.learner.predict(states).values()]

    def _outputs(self, rounds: Sequence[Sequence[Question]]) -> list[list[Any]]:
        """Answer questions of several scripts; predictions are made together."""
        asks = [question for of_script in rounds for question in of_script if isinstance(question, Ask)]
        outputs = self._predictions(asks)
        slopes = {
            q: self._learners[q.role].slope for of_script in rounds for q in of_script if q not in outputs
        }
        outputs |= {question: slope(question.state, question.value) for question, slope in slopes.items()}
        return [[outputs[question] for question in of_script] for of_script in rounds]

    @torch.no_grad()
    def _predictions(self, asks: list[Ask]) -> dict[Question, Prediction]:
        """Return a prediction for each question; the teacher predicts for all at once."""
        calls: list[tuple[list[Ask], Callable[[], list[Prediction]]]] = []
        for blocks in dict.fromkeys(ask.blocks for ask in asks if ask.role == TEACHER):
            alike = [ask for ask in asks if ask.role == TEACHER and ask.blocks == blocks]
            calls.append((alike, partial(self.teacher.predict_all, [ask.state for ask in alike], blocks)))
        for ask in (ask for ask in asks if ask.role != TEACHER):
            calls.append(([ask], lambda ask=ask: [self._learners[ask.role].forward(ask.state)]))
        made = self._together([call for _, call in calls])
        return {
            ask: p
            for (of_call, _), found in zip(calls, made, strict=True)
            for ask, p in zip(of_call, found, strict=True)
        }

    def _together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Make calls without gradients, block by block if all networks have weights that arrive so."""
        job = self.job
        if not (job.networks.share_base and job.teacher.sweeps) or job.student_engine.stage == 3:
            return [call() for call in calls]
        blocks = [block for learner in self._learners.values() for block in learner.blocks]
        for network in local_modules(self.teacher):
            blocks += network.blocks
        return block_by_block(blocks, calls)

    def _micro_step(self, play: Play, known: list[list[Prediction]]) -> MicroStepResult:
        """Compute the loss and its gradients; on the last micro-step of an update the weights change.

        Args:
            known: outputs for what the script asks after the pass that learns, as far as they are known.
        """
        first = play.questions[0].state
        with activity(f"the {self.role}'s forward pass"):
            play.answer(self._predict(play))
            while play.questions:
                play.answer(known.pop(0) if known else self._outputs([play.questions])[0])
        rows_TB, numbers = play.loss.rows_TB, play.loss.numbers
        with activity(f"the {self.role}'s backward pass"):
            self.learner.backward(first.expert, propagate_nonfinite(self.total(rows_TB).mean()))
        with activity("the optimizer's step"):
            self.learner.step(first.expert)
        return MicroStepResult(rows_TB.detach(), first.sigma_B, first.expert, numbers)


def worker(name: str) -> ThreadPoolExecutor:
    """Make a thread for one task after the other on this rank's device, which CUDA keeps for each thread."""
    return ThreadPoolExecutor(1, name, initializer=make_current)


class ReadAhead(Generic[T]):
    """Micro-steps' samples in the order of training; the next ones are read while these are computed."""

    def __init__(self, read: Callable[[int, int], T], accumulation: int, updates: int, depth: int):
        """Read by `read(update, micro)`, which runs in a thread, the updates of the run counted from 0.

        Args:
            accumulation: micro-steps of an update.
            updates: of the whole run; nothing is read beyond.
            depth: micro-steps that are read ahead.
        """
        self._read, self._accumulation, self._depth = read, accumulation, depth
        self._end, self._next = updates * accumulation, 0
        self._pending: dict[int, Future[T]] = {}
        self._worker = worker("reader")

    def __call__(self, update: int, micro: int) -> T:
        """Return a micro-step's samples; an error in reading them is raised here."""
        place = update * self._accumulation + micro
        pending = self._pending.pop(place, None)
        samples = self._read(update, micro) if pending is None else pending.result()
        first, self._next = max(place + 1, self._next), min(place + 1 + self._depth, self._end)
        for ahead in range(first, self._next):
            self._pending[ahead] = self._worker.submit(self._read, *divmod(ahead, self._accumulation))
        return samples


class RollOuts:
    """Reads samples, and lets the student sample where an objective's terms need that.

    For all updates of a step at once where the weights arrive block by block: the student's do not change
    before its own update, which is the last. Updates before the first step are taken as many at a time.
    """

    def __init__(self, job: Job, read: Reads, student: Learner):
        self._job, self._read, self._student, self._together = job, read, student, rolled_out(job)
        self._made: dict[tuple[int, int], dict[str, State]] = {}

    def __call__(self, update: int, micro: int) -> dict[str, State]:
        if not self._job.objective.rolls_out(self._job.objective.role_of(update)):
            return self._read(update, micro)
        if (update, micro) not in self._made:
            self._make(update, micro)
        return self._made.pop((update, micro))

    def _make(self, update: int, micro: int) -> None:
        """Sample for a micro-step, and for those that follow it in its step."""
        accumulation, objective = self._job.batch.accumulation, self._job.objective
        step = (update - objective.first_update(0)) // len(objective.updates)
        end = objective.first_update(step + 1) * accumulation
        places = range(update * accumulation + micro, end)[: self._together]
        keys = [divmod(place, accumulation) for place in places]
        with activity(READING):
            drawn = [self._read(*key) for key in keys]
        with activity("the student's sampling"), torch.no_grad():
            scripts = [
                objective.roll_out(objective.role_of(u), states, self._job.schedule)
                for (u, _), states in zip(keys, drawn, strict=True)
            ]
            calls = [partial(played, one, lambda ask: self._student.forward(ask.state)) for one in scripts]
            self._made |= zip(keys, block_by_block(self._student.blocks, calls), strict=True)
