"""Updates of a step, each for one role: samples, and forward and backward passes of all that learn in it."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State
from wandistiller.config.job import Job, swept
from wandistiller.distributed.device import on_accelerator, worker
from wandistiller.network.sweep import backward_together, block_by_block
from wandistiller.objectives.script import TEACHER, Ask, Learn, Play, Question, Slope
from wandistiller.student.learner import Learner
from wandistiller.teacher.base import Teacher, local_modules
from wandistiller.training.step_result import READING, MicroStepResult
from wandistiller.utils.logging import activity

PREDICTING = "the teacher's forward pass"
Reads = Callable[[int, int], dict[str, State]]
"""This rank's samples of an update and a micro-step by kind of states."""
Predicts = Callable[[], list[Prediction]]


def propagate_nonfinite(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `losses`, by role; if one is not finite, make the gradients of all non-finite too.

    So every engine skips the step, on all ranks, whichever had the loss, and for a loss that overflowed in a
    square while its gradient did not. It needs neither a collective nor a transfer from the device.
    """
    are_finite = torch.stack([loss.detach().isfinite() for loss in losses.values()]).all()
    return {role: loss * torch.where(are_finite, 1.0, math.nan) for role, loss in losses.items()}


class Update:
    """Updates of one role's network, and of those that learn with it, by the run's objective."""

    def __init__(self, role: str, job: Job, learners: dict[str, Learner], teacher: Teacher | None):
        self.role, self.job, self.teacher = role, job, teacher
        self.objective = job.objective.for_student(job.stands_for)
        self.learners, self.student = learners, learners[STUDENT]
        self._worker = worker("teacher")
        self._begun: dict[int, Future[list[list[Play]]]] = {}
        """Scripts of a later update, which the teacher has answered, in the order of its micro-steps."""

    def micro_steps(
        self, update: int, reads: Reads, following: int | None = None
    ) -> list[dict[str, MicroStepResult]]:
        """Make all forward and backward passes on this rank's samples of an update, counted from 0.

        Return results by the role that learned; the order of roles is the same on all ranks.

        Args:
            following: the role's next update, if the teacher may already predict for it.
        """
        with activity(PREDICTING):
            begun = self._begun.pop(update).result() if update in self._begun else []
        ahead = self._works_ahead and following is not None
        self.learners[self.role].while_updating(partial(self._begin, following, reads) if ahead else None)
        results = []
        for group in self._groups:
            with activity(READING):
                plays = begun.pop(0) if begun else self._plays(update, group, reads)
            results += self._learn(plays)
            del plays  # nothing refers to their samples when the next ones are read
        return results

    def _plays(self, update: int, group: range, reads: Reads) -> list[Play]:
        """Read the samples of micro-steps, and begin their scripts."""
        schedule, samples = self.job.schedule, [reads(update, micro) for micro in group]
        return [Play(self.objective.script(self.role, of_one, schedule)) for of_one in samples]

    def _learn(self, plays: list[Play]) -> list[dict[str, MicroStepResult]]:
        """Make the micro-steps of a group."""
        with activity(PREDICTING):
            self._ask(plays, lambda ask: True)
        return [self._micro_step(play) for play in plays]

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
        if self.role != STUDENT or not self.objective.needs_teacher or self.objective.rolls_out(STUDENT):
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
        blocks = [block for learner in self.learners.values() for block in learner.blocks]
        for network in local_modules(self.teacher):
            blocks += network.blocks
        return block_by_block(blocks, calls)

    def _micro_step(self, play: Play) -> dict[str, MicroStepResult]:
        """Compute the losses and their gradients; on the last micro-step of an update the weights change."""
        first: dict[str, State] = {}
        with activity(f"the {self.role}'s forward pass"):
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
