"""Progress lines with the time left."""

import time

from wandistiller.distributed.collectives import log0
from wandistiller.utils.logging import heartbeat, set_activity


def clock(seconds: float) -> str:
    """Format seconds as 1h02m, 3m07s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if minutes else f"{s}s"


class Progress:
    """Log the progress of a task on rank 0, at most once every few seconds."""

    def __init__(self, name: str, total: int, every_seconds: float = 5.0):
        self._name, self._total, self._every = name, total, every_seconds
        self._done, self._started, self._logged = 0, time.monotonic(), 0.0
        set_activity(name)

    def advance(self) -> None:
        heartbeat()
        self._done += 1
        now = time.monotonic()
        if self._done == self._total or now - self._logged >= self._every:
            self._logged = now
            left = (now - self._started) / self._done * (self._total - self._done)
            log0("%s: %d/%d, %s left", self._name, self._done, self._total, clock(left))
