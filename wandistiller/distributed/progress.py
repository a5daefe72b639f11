"""Progress with the time left: a bar in a terminal, else log lines; a word where all is silent for long."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tqdm import tqdm

from wandistiller.distributed.collectives import log0, rank
from wandistiller.utils.logging import current, heartbeat, set_activity

P, R = ParamSpec("P"), TypeVar("R")
LINE_SECONDS = 5.0
"""Least time between two lines of a task's progress, but for the last."""
SILENCE_SECONDS = 25.0
"""Time without a line after which rank 0 says what it is doing."""


def clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if minutes else f"{s}s"


def speed(number: float, seconds: float, unit: str) -> str:
    """Format a rate as 12.3 samples/s, or from a second each on as 7.4 s a sample, 3m07s a sample."""
    each = seconds / number
    if each < 1:
        return f"{1 / each:.1f} {unit}s/s"
    return f"{each:.1f} s a {unit}" if each < 60 else f"{clock(each)} a {unit}"


_bars: list[tqdm] = []
"""Those that are shown, the innermost last."""


def bar(name: str, total: int, done: int = 0) -> tqdm:
    """Make a bar that rank 0 alone shows, and only in a terminal; its `disable` tells that it does not."""
    shown = total > 0 and rank() == 0 and sys.stderr is not None and sys.stderr.isatty()
    # some terminals have no width, and no bar in it
    has_width = shown and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    width = {"dynamic_ncols": True} if has_width else {"ncols": 100, "nrows": 20}
    # `disable` is said here, as TQDM_DISABLE is set for the bars of the libraries
    made = tqdm(desc=name, total=total, initial=done, disable=not shown, **width)
    _bars[:] = [b for b in _bars if not b.disable] + [made] * shown  # closing a bar disables it
    return made


class Progress:
    """The progress of a task on rank 0; without a terminal a line every few seconds at most."""

    def __init__(self, name: str, total: int, unit: str = "call", *, first_line: float = 0.0):
        """Begin.

        Args:
            total: units of work, such as calls of a network, that all take about as long.
            unit: their name in the singular.
            first_line: seconds of work before which there is no line.
        """
        self._name, self._total, self._unit = name, total, unit
        self.done, self._started = 0, time.monotonic()
        self._first_line, self._next_line = first_line, self._started + first_line
        self._bar = bar(name, total)
        self._is_logged = self._bar.disable  # closing the bar sets that too
        set_activity(name)

    def advance(self) -> None:
        heartbeat()
        self.done += 1
        self._bar.update()
        if self.done == self._total:
            self._bar.close()
        now = time.monotonic()
        took, is_due = now - self._started, now >= self._next_line
        current.due = now + took / self.done
        if self._is_logged and (is_due or self.done == self._total and took >= self._first_line):
            self._next_line = now + LINE_SECONDS
            left = took / self.done * (self._total - self.done)
            pace = speed(self.done, max(took, 1e-9), self._unit)
            log0("%s: %d/%d, %s, %s left", self._name, self.done, self._total, pace, clock(left))

    def skip(self, number: int) -> None:
        """Take units out of the total: their results are there already."""
        self._total -= number
        self._bar.total = self._total
        if self.done == self._total:
            self._bar.close()

    def counting(self, call: Callable[P, R]) -> Callable[P, R]:
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            result = call(*args, **kwargs)
            self.advance()
            return result

        return counted


def break_silence() -> threading.Event:
    """Start the thread by which rank 0 says every `SILENCE_SECONDS` what it does, if nothing else is said.

    A bar in a terminal is drawn anew instead, each second, so that its clock goes on within a long unit.

    Returns:
        An event that ends the thread.
    """
    ended, current.spoke = threading.Event(), time.monotonic()

    def speak() -> None:
        while not ended.wait(1):
            shown = [b for b in _bars if not b.disable]
            if shown:
                shown[-1].refresh()
            elif time.monotonic() - current.spoke >= SILENCE_SECONDS:
                log0("still      %s: %s so far", current.activity, clock(time.monotonic() - current.began))

    if rank() == 0:
        threading.Thread(target=speak, daemon=True).start()
    return ended
