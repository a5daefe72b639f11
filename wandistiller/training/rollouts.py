"""Samples of updates: read ahead, and drawn by the student where an objective's terms need its own."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, State
from wandistiller.checkpoint.loading import CARRIED
from wandistiller.checkpoint.safetensors_stream import ShardedTensors
from wandistiller.config.job import Job, rolled_out, swept
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.distributed import collectives
from wandistiller.distributed.device import worker
from wandistiller.network.sweep import block_by_block
from wandistiller.objectives.script import played
from wandistiller.student.learner import Learner
from wandistiller.training.step_result import READING
from wandistiller.utils.logging import activity

T = TypeVar("T")


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
    before its own update, which is the last.
    """

    def __init__(self, job: Job, batches: MicroBatches, student: Learner):
        self._job, self._batches, self._student, self._together = job, batches, student, rolled_out(job)
        depth = max(swept(job), self._together)
        self._read = ReadAhead(self._draw, job.batch.accumulation, job.updates, depth)
        self._made: dict[tuple[int, int], dict[str, State]] = {}
        self._carried: list[Tensor] = []
        """States of each micro-step, on the CPU, from which the samples of the student's next update go on.

        Empty if they begin anew."""

    def __call__(self, update: int, micro: int) -> dict[str, State]:
        if not self._job.objective.rolls_out(self._job.objective.role_of(update)):
            return self._read(update, micro)
        if (update, micro) not in self._made:
            self._make(update, micro)
        return self._made.pop((update, micro))

    def _draw(self, update: int, micro: int) -> dict[str, State]:
        objective = self._job.objective
        return objective.draw(objective.role_of(update), self._batches, update, micro)

    def _make(self, update: int, micro: int) -> None:
        """Sample for a micro-step, and for those that follow it in its step."""
        accumulation, objective = self._job.batch.accumulation, self._job.objective
        step = update // len(objective.updates)
        end = objective.first_update(step + 1) * accumulation
        micro_steps = range(update * accumulation + micro, end)[: self._together]
        keys = [divmod(number, accumulation) for number in micro_steps]
        with activity(READING):
            drawn = [self._read(*key) for key in keys]
        with activity("the student's sampling"), torch.no_grad():
            scripts = []
            for (number, at), states in zip(keys, drawn, strict=True):
                role = objective.role_of(number)
                carried_BCFHW = self._carried[at] if role == STUDENT and self._carried else None
                scripts.append(objective.roll_out(role, states, self._job.schedule, carried_BCFHW))
            calls = [partial(played, s, lambda ask: self._student.forward(ask.state)) for s in scripts]
            self._made |= zip(keys, block_by_block(self._student.blocks, calls), strict=True)

    def carry(self, states: Sequence[Tensor | None]) -> None:
        """Take the states from which the samples of the student's next update go on, by micro-step, or None.

        They are kept float32, in CPU memory.
        """
        self._carried = [x_BCFHW.cpu() for x_BCFHW in states if x_BCFHW is not None]

    def carried(self) -> dict[int, Tensor]:
        """Return the states that this rank stores, by the number of their first sample in an update."""
        if self._student.ranks.place:  # of ranks that share a sample the first has it
            return {}
        numbers = (self._batches.indices(0, micro)[0] for micro in range(len(self._carried)))
        return dict(zip(numbers, self._carried, strict=True))

    def resume(self, folder: Path, changed: set[str]) -> None:
        """Go on from the states of a checkpoint, whatever ranks have written them.

        Args:
            changed: keys of the run's identity that differ from the checkpoint's: samples begin anew then.
        """
        if not (folder / CARRIED).is_dir():
            return
        if changed:
            collectives.log0("carried   samples begin anew, with another %s", ", ".join(sorted(changed)))
            return
        pieces, replicas = ShardedTensors(folder / CARRIED), self._student.ranks.replicas
        if pieces.files != replicas:
            collectives.log0("carried   samples of %d ranks are dealt to %d", pieces.files, replicas)
        shape = self._job.batch.micro, *self._batches.latent
        for micro in range(self._job.batch.accumulation):
            first = self._batches.indices(0, micro)[0] * math.prod(self._batches.latent)
            x_BCFHW = pieces.read(CARRIED, "x", first, math.prod(shape)).view(shape).clone()
            self._carried.append(x_BCFHW)
