"""Samples of micro-steps, with the states to which the student's own sampling leads."""

from collections.abc import Callable
from functools import partial

import torch

from wandistiller.batch import State
from wandistiller.config.job import Job
from wandistiller.objectives.script import played
from wandistiller.student.learner import Learner
from wandistiller.teacher.sweep import block_by_block
from wandistiller.training.step_result import READING
from wandistiller.utils.logging import activity

Reads = Callable[[int, int], dict[str, State]]
"""This rank's samples of an update and a micro-step by kind of states."""


class RollOuts:
    """Reads samples, and lets the student sample where an objective's terms need that.

    For all updates of a step at once where the weights arrive block by block: the student's do not change
    before its own update, which is the last. Updates before the first step are taken as many at a time.
    """

    def __init__(self, job: Job, read: Reads, student: Learner):
        self._job, self._read, self._student, self._together = job, read, student, job.rolled_out
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
            calls = [
                partial(played, script, lambda ask: self._student.forward(ask.state)) for script in scripts
            ]
            self._made |= zip(keys, block_by_block(self._student.blocks, calls), strict=True)
