"""Updates: their samples, and the objective's scripts, which are played on them with the run's networks."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.config.job import Job, rolled_out, swept
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.distributed.device import on_accelerator, worker
from wandistiller.network.sweep import backward_together, block_by_block
from wandistiller.objectives.script import TEACHER, Ask, Learn, Play, Question, Slope
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher, local_modules
from wandistiller.training.carried import Carried
from wandistiller.training.step_result import READING, MicroStepResult
from wandistiller.utils.logging import activity

T = TypeVar("T")
PREDICTING = "the teacher's forward pass"
Predicts = Callable[[], list[Prediction]]


def propagate_nonfinite(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `losses`, by role; if one is not finite, make the gradients of all non-finite too.

    So every engine skips the step, on all ranks, whichever had the loss, and for a loss that overflowed in a
    square while its gradient did not. It needs neither a collective nor a transfer from the device.
    """
    are_finite = torch.stack([loss.detach().isfinite() for loss in losses.values()]).all()
    return {role: loss * torch.where(are_finite, 1.0, math.nan) for role, loss in losses.items()}


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


class Updates:
    """All updates of a run, each of one role's network and of those that learn with it."""

    def __init__(
        self, job: Job, batches: MicroBatches, learners: dict[str, Learner], teacher: Teacher | None
    ):
        self.job, self.teacher, self._batches = job, teacher, batches
        self.objective = job.objective.for_student(job.stands_for)
        self.learners, self.student = learners, learners[STUDENT]
        self.carried = Carried(job, batches, self.student.ranks)
        self._at_once = rolled_out(job)
        """Micro-steps whose samples the student draws together."""
        depth = max(swept(job), self._at_once)
        self._read = ReadAhead(self.draw, job.batch.accumulation, job.updates, depth)
        self._sampled: dict[tuple[int, int], Play] = {}
        """Scripts whose samples the student has drawn, by update and micro-step."""
        self._worker = worker("teacher")
        self._predicted: dict[int, Future[list[list[Play]]]] = {}
        """Scripts of later updates that the teacher has answered, in groups of micro-steps."""

    def draw(self, update: int, micro: int) -> dict[str, State]:
        """Draw this rank's samples of a micro-step, by kind of states."""
        return self.objective.draw(self.objective.role_of(update), self._batches, update, micro)

    def micro_steps(self, update: int, following: int | None = None) -> list[dict[str, MicroStepResult]]:
        """Make all forward and backward passes on this rank's samples of an update, counted from 0.

        Return results by the role that learned; the order of roles is the same on all ranks.

        Args:
            following: the role's next update, if the teacher may already predict for it.
        """
        role = self.objective.role_of(update)
        with activity(PREDICTING):
            predicted = self._predicted.pop(update).result() if update in self._predicted else []
        ahead = following is not None and self._works_ahead(role)
        self.learners[role].while_updating(partial(self._predict_ahead, following) if ahead else None)
        results = []
        for group in self._groups(role):
            plays = predicted.pop(0) if predicted else [self._play(update, micro) for micro in group]
            with activity(PREDICTING):
                self._ask(plays, lambda ask: True)
            results += [self._micro_step(role, play) for play in plays]
            del plays  # nothing refers to their samples when the next ones are read
        return results

    def _play(self, update: int, micro: int) -> Play:
        """Begin a micro-step's script, up to the end of the student's sampling.

        Where its weights arrive block by block it samples for all updates of a step at once: it does not
        change before its own, which is the last.
        """
        accumulation, objective = self.job.batch.accumulation, self.objective
        if not objective.rolls_out(objective.role_of(update)):
            with activity(READING):
                return self._begun(update, micro)
        if (update, micro) not in self._sampled:
            step = update // len(objective.updates)
            end = objective.first_update(step + 1) * accumulation
            micro_steps = range(update * accumulation + micro, end)[: self._at_once]
            keys = [divmod(number, accumulation) for number in micro_steps]
            with activity(READING):
                plays = [self._begun(*key) for key in keys]
            with activity("the student's sampling"):
                self._ask(plays, lambda ask: ask.role == STUDENT)
            self._sampled |= zip(keys, plays, strict=True)
        return self._sampled.pop((update, micro))

    def _begun(self, update: int, micro: int) -> Play:
        """Read a micro-step's samples, and begin its script."""
        role, states = self.objective.role_of(update), self._read(update, micro)
        carried_BCFHW = self.carried.of(micro) if role == STUDENT else None
        return Play(self.objective.script(role, states, self.job.schedule, carried_BCFHW))

    def _groups(self, role: str) -> list[range]:
        """Return the micro-steps of an update whose samples go through the teacher together."""
        number, together = self.job.batch.accumulation, swept(self.job) if role == STUDENT else 1
        return [range(first, min(first + together, number)) for first in range(0, number, together)]

    def _works_ahead(self, role: str) -> bool:
        """Return whether the teacher predicts for the next update while the optimizer updates the weights.

        Its noise is keyed and its weights are frozen, so that it does not depend on the student, unless it
        predicts at the student's samples. Ranks that share a sequence exchange parts of it in one order.
        """
        if role != STUDENT or not self.objective.needs_teacher or self.objective.rolls_out(STUDENT):
            return False
        return self.student.ranks.degree == 1 and self.job.teacher.works_ahead(on_gpu=on_accelerator())

    def _predict_ahead(self, update: int) -> None:
        """Read an update's samples, and let the teacher predict, in a thread.

        Of hidden states to compare, which are large, only those of the first micro-steps.
        """
        groups = self._groups(STUDENT)[: 1 if self.objective.student_blocks else None]

        def begin(group: range) -> list[Play]:
            plays = [self._begun(update, micro) for micro in group]
            self._ask(plays, lambda ask: ask.role == TEACHER)
            return plays

        self._predicted[update] = self._worker.submit(lambda: [*map(begin, groups)])

    def _ask(self, plays: list[Play], may: Callable[[Ask], bool]) -> None:
        """Go on with scripts up to a pass that learns, as far as `may` is true of what they ask."""
        while asking := [play for play in plays if play.asks and all(map(may, play.questions))]:
            outputs = self._outputs([play.questions for play in asking])
            for play, of_play in zip(asking, outputs, strict=True):
                play.answer(of_play)

    def _outputs(self, rounds: Sequence[Sequence[Question]]) -> list[list[Any]]:
        """Answer questions of several scripts; predictions are made together."""
        questions = [question for of_script in rounds for question in of_script]
        outputs: dict[Question, Any] = {}
        for slope in (q for q in questions if isinstance(q, Slope)):
            outputs[slope] = self.learners[slope.role].slope(slope.state, slope.value)
        calls = [*self._asked([q for q in questions if isinstance(q, Ask)])]
        calls += self._learned([q for q in questions if isinstance(q, Learn)])
        made = self._together([call for _, call in calls])
        for (of_call, _), predictions in zip(calls, made, strict=True):
            outputs |= zip(of_call, predictions, strict=True)
        return [[outputs[question] for question in of_script] for of_script in rounds]

    def _asked(self, asks: list[Ask]) -> Iterator[tuple[list[Ask], Predicts]]:
        """Yield forward passes without gradient; the teacher predicts for all states at once."""
        for blocks in dict.fromkeys(ask.blocks for ask in asks if ask.role == TEACHER):
            alike = [ask for ask in asks if ask.role == TEACHER and ask.blocks == blocks]
            states = [ask.state for ask in alike]
            yield alike, torch.no_grad()(partial(self.teacher.predict_all, states, blocks))
        for ask in (ask for ask in asks if ask.role != TEACHER):
            yield [ask], torch.no_grad()(lambda ask=ask: [self.learners[ask.role].forward(ask.state)])

    def _learned(self, learns: list[Learn]) -> Iterator[tuple[list[Learn], Predicts]]:
        """Yield forward passes that learn, one of each role for all states that it learns at."""
        for role in dict.fromkeys(learn.role for learn in learns):
            alike = [learn for learn in learns if learn.role == role]
            states = {number: learn.state for number, learn in enumerate(alike)}
            predict = self.learners[role].predict
            yield alike, lambda predict=predict, states=states: [*predict(states).values()]

    @property
    def _sweeps(self) -> bool:
        """True if all networks have the same weights, which arrive block by block."""
        job = self.job
        return job.networks.share_base and job.teacher.sweeps and job.student_engine.stage < 3

    def _together(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Make forward passes, block by block where weights arrive so."""
        if not self._sweeps:
            return [call() for call in calls]
        networks = *self.learners.values(), *local_modules(self.teacher)
        return block_by_block([block for network in networks for block in network.blocks], calls)

    def _micro_step(self, role: str, play: Play) -> dict[str, MicroStepResult]:
        """Compute the losses and their gradients; on the last micro-step of an update the weights change."""
        first: dict[str, State] = {}
        with activity(f"the {role}'s forward pass"):
            while play.questions:
                for question in play.questions:
                    if isinstance(question, Learn):
                        first.setdefault(question.role, question.state)
                play.answer(self._outputs([play.questions])[0])
        losses = {role: play.result[role] for role in reversed(first)}  # so activations are freed in turn
        totals = {role: self.objective.total(loss.rows_TB, role).mean() for role, loss in losses.items()}
        backward = [
            partial(self.learners[role].backward, first[role].expert, loss)
            for role, loss in propagate_nonfinite(totals).items()
        ]
        with activity(f"the {' and '.join(totals)}'s backward pass"):
            backward_together(backward) if self._sweeps else [call() for call in backward]
        with activity("the optimizer's step"):
            for role in totals:
                self.learners[role].step(first[role].expert)
        return {
            role: MicroStepResult(
                loss.rows_TB.detach(),
                first[role].sigma_B,
                first[role].expert,
                loss.numbers,
                loss.carried_BCFHW,
            )
            for role, loss in losses.items()
        }
