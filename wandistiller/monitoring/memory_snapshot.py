"""`--profile_memory N`: torch's record of GPU memory in steps N to N + 2, for https://pytorch.org/memory_viz."""

from collections.abc import Iterator
from contextlib import contextmanager

from wandistiller.config.job import Job
from wandistiller.distributed import collectives, device
from wandistiller.utils.files import atomic

STEPS = 3
MOST_EVENTS = 500_000
"""Allocations and releases that are kept, the last ones; each takes a few KB of CPU memory."""


class MemoryProfile:
    """Record of the steps that the run names, in OUTPUT/profile_memory/rank_R.pickle after the last of them.

    A step that fails, as by running out of memory, is written too: its record shows what was allocated then.
    """

    def __init__(self, job: Job):
        first = job.run.profile_memory
        self.steps = range(first, min(first + STEPS, job.run.max_steps + 1)) if first else range(0)
        """Counted from 1."""
        self._file = job.output / "profile_memory" / f"rank_{collectives.rank()}.pickle"
        self._recording = False

    def warn_if_past(self, done: int) -> None:
        if self.steps and done >= self.steps[-1]:
            text = "`profile_memory` is %d, but %d steps are done already: no memory is recorded"
            collectives.log0(text, self.steps[0], done)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Record what happens inside, if `step`, counted from 1, is among those named."""
        if step not in self.steps:
            yield
            return
        if not self._recording:
            device.record_allocations(MOST_EVENTS)
            self._recording = True
        try:
            yield
        except BaseException:
            self._write()
            raise
        if step == self.steps[-1]:
            self._write()

    def _write(self) -> None:
        with atomic(self._file) as temporary:
            device.write_allocations(temporary)
        device.record_allocations(None)
        text = "memory    of steps %d to %d: %s; open it on https://pytorch.org/memory_viz"
        collectives.log0(text, self.steps[0], self.steps[-1], self._file)
