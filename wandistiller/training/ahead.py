"""Work for what follows, made in threads while this rank computes or updates weights."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from wandistiller.distributed.device import make_current

T = TypeVar("T")


def worker(name: str) -> ThreadPoolExecutor:
    """Make a thread for one task after the other on this rank's device, which CUDA keeps for each thread."""
    return ThreadPoolExecutor(1, name, initializer=make_current)


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
