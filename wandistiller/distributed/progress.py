"""Progress with the time left: a bar in a terminal, else log lines."""

import os
import sys
import time

from tqdm import tqdm

from wandistiller.distributed.collectives import log0, rank
from wandistiller.utils.logging import heartbeat, set_activity


def clock(seconds: float) -> str:
    """Format seconds as 1h02m, 3m07s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if minutes else f"{s}s"


def bar(name: str, total: int, done: int = 0) -> tqdm:
    """Make a bar that rank 0 alone shows, and only in a terminal; its `disable` tells that it does not."""
    shown = rank() == 0 and sys.stderr is not None and sys.stderr.isatty()
    has_width = (
        shown and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    )  # some have none: no bar in it
    width = {"dynamic_ncols": True} if has_width else {"ncols": 100, "nrows": 20}
    # `disable` is said here, as TQDM_DISABLE is set for the bars of the libraries
    return tqdm(desc=name, total=total, initial=done, disable=not shown, **width)


class Progress:
    """The progress of a task on rank 0; without a terminal a line every few seconds at most."""

    def __init__(self, name: str, total: int, every_seconds: float = 5.0):
        self._name, self._total, self._every = name, total, every_seconds
        self._done, self._started, self._logged = 0, time.monotonic(), 0.0
        self._bar = bar(name, total)
        self._is_logged = self._bar.disable  # closing the bar sets that too
        set_activity(name)

    def advance(self) -> None:
        heartbeat()
        self._done += 1
        self._bar.update()
        if self._done == self._total:
            self._bar.close()
        now = time.monotonic()
        if self._is_logged and (self._done == self._total or now - self._logged >= self._every):
            self._logged = now
            left = (now - self._started) / self._done * (self._total - self._done)
            log0("%s: %d/%d, %s left", self._name, self._done, self._total, clock(left))
