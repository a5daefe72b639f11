"""Bounds in minutes on what is otherwise done every so many steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAVING, DRAWING = 10, 20
"""Checkpoints, and pictures, by the clock take at most one of so many parts of the time."""


class Interval:
    """Tells when something that takes time was last done too long ago."""

    def __init__(self, minutes: float, parts: int, clock: Callable[[], float] = time.monotonic):
        """Begin now, for what may take one of so many parts of the time; `clock` gives seconds."""
        self._least, self._parts, self._clock = 60 * minutes, parts, clock
        self._since, self._took = clock(), 0.0

    def over(self) -> bool:
        """Return whether the minutes have passed since it was last done, and parts - 1 times what it took."""
        return self._clock() - self._since >= max(self._least, (self._parts - 1) * self._took)

    @contextmanager
    def doing(self) -> Iterator[None]:
        """Measure it; the minutes begin anew at the end of the block."""
        began = self._clock()
        yield
        self._since = self._clock()
        self._took = self._since - began
