"""`--profile_memory N`: what is resident during three steps, when and for whom; a picture and its numbers for each rank."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from wandistiller import distributed
from wandistiller.census import Storage, by_owner, census
from wandistiller.files import atomic, write_json
from wandistiller.job import Job
from wandistiller.memory_picture import draw
from wandistiller.objectives import Teacher
from wandistiller.phase import now
from wandistiller.student import Student
from wandistiller.timeline import Clock, Span, allocated, thinned, told

STEPS = 3
EVERY_SECONDS = 0.005
MOST_SAMPLES = 20_000
"""Samples that are kept; of more each two become one."""
MOST_EVENTS = 500_000
"""Of an accelerator's allocator that are kept, the last; each takes some KB of CPU memory."""
STATM = Path("/proc/self/statm")


class Sampler(threading.Thread):
    """Reads resident memory every few milliseconds until it is stopped, and what torch holds of an accelerator."""

    def __init__(self) -> None:
        super().__init__(name="memory samples", daemon=True)
        self.samples: list[tuple[float, int, int]] = []
        """Seconds of the monotonic clock; bytes in CPU memory; bytes of the accelerator."""
        self._every, self._ended = EVERY_SECONDS, threading.Event()

    def run(self) -> None:
        page, cuda = os.sysconf("SC_PAGE_SIZE"), torch.cuda.is_available()
        while not self._ended.wait(self._every):
            resident = int(STATM.read_bytes().split()[1]) * page
            self.samples.append((time.monotonic(), resident, torch.cuda.memory_reserved(distributed.device()) if cuda else 0))
            if len(self.samples) == MOST_SAMPLES:
                pairs = zip(self.samples[::2], self.samples[1::2], strict=True)
                self.samples = [max(pair, key=lambda sample: sample[1:]) for pair in pairs]
                self._every *= 2

    def stop(self) -> None:
        self._ended.set()
        self.join()


class MemoryProfile:
    """Records the steps that the run asked for, and writes when the last of them is done, or one fails."""

    def __init__(self, job: Job, teacher: Teacher | None, student: Student):
        self._folder = job.output / "profile_memory"
        self._teacher, self._student = teacher, student
        first = job.run.profile_memory
        self.steps = range(first, min(first + STEPS, job.run.max_steps + 1)) if first else range(0)
        """Counted from 1."""
        self._step = 0
        self._spans: list[Span] = []
        """Of each step the last is empty: what is there when it ends."""
        self._sampler: Sampler | None = None
        self._before: dict[int, Storage] = {}
        self._allocated = 0
        """On the accelerator, when its allocator's record began."""
        self._ahead = 0.0
        """Seconds of the wall clock, which that record has, before the monotonic one."""

    def say(self, done: int) -> None:
        """Say so if a run that goes on after `done` steps has nothing left to record."""
        if self.steps and done >= self.steps[-1]:
            distributed.log0("`profile_memory` is %d, but %d steps are done already: no memory is recorded", self.steps[0], done)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """A step, counted from 1; it is recorded if it was asked for."""
        if step not in self.steps:
            yield
            return
        if self._sampler is None:
            self._sampler = Sampler()
            self._sampler.start()
        self._step, now.changed, more = step, self._turn, False
        try:
            yield
            more = step < self.steps[-1]
        finally:
            now.changed = None
            self._turn()
            if not more:
                self._sampler.stop()
                self._write()

    def _turn(self) -> None:
        """Close a span, count, and open the next: what the process does has changed. The time of the count is in none."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._spans and self._spans[-1].step == self._step:
            self._spans[-1] = self._spans[-1]._replace(end=time.monotonic())
        found, cuda = census(self._teacher, self._student), torch.cuda.is_available()
        if cuda and not self._spans:
            how = {"stacks": "python", "context": "alloc", "max_entries": MOST_EVENTS, "clear_history": True}
            torch.cuda.memory._record_memory_history(**how)
            self._before = {address: s for address, s in found.items() if s.place == "cuda"}
            self._allocated, self._ahead = torch.cuda.memory_allocated(), time.time() - time.monotonic()
        owners = {place: by_owner(found.values(), place) for place in ("cpu", *["cuda"] * cuda)}
        begin = time.monotonic()
        self._spans.append(Span(self._step, now.what, owners, begin, begin))

    def _write(self) -> None:
        rank = distributed.rank()
        record: dict[str, Any] = {"rank": rank} | told(self._spans, self._sampler.samples)
        if torch.cuda.is_available():
            record["cuda"]["owners"] = self._timeline()
            with atomic(self._folder / f"rank_{rank}.pickle") as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
            torch.cuda.memory._record_memory_history(enabled=None)
        write_json(self._folder / f"rank_{rank}.json", record)
        draw(self._folder / f"rank_{rank}.png", record)
        distributed.log0("memory    of steps %d to %d is drawn in %s", record["steps"][0], record["steps"][-1],
                         self._folder / f"rank_{rank}.png")  # fmt: skip

    def _timeline(self) -> list[dict[str, Any]]:
        """The accelerator's memory by owner, event by event."""
        clock = Clock(self._spans)

        def doing(wall: float) -> str:
            span = clock.span(wall - self._ahead)
            return span.what if span else ""

        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        points = allocated(events, self._before, self._allocated, doing)
        return [{"second": clock.at(wall - self._ahead), **owners} for wall, owners in thinned(points)]
