"""Ranks that are suspended, for test_watchdog.py; the watch's times are short."""

import os
import signal
import time
from collections.abc import Callable

from wandistiller.distributed import collectives, watchdog


def _ready(gone: float) -> list[int]:
    """Shorten the watch's times; return the ranks' processes, all of which have been heard of."""
    watchdog.POLL_SECONDS, watchdog.HEARTBEAT_SECONDS, watchdog.GRACE_SECONDS = 0.1, 0.1, 0.3
    pids = collectives.gather_objects(os.getpid())
    while len(collectives.watchdog._beats) < (1 if collectives.rank() else len(pids)):
        time.sleep(0.05)
    collectives.barrier()
    watchdog.GONE_SECONDS = gone
    return pids


def _from_outside(act: Callable[[], None]) -> None:
    """Act in another process, which outlives rank 0."""
    if collectives.rank() == 0 and not os.fork():
        act()
        os._exit(0)


def suspend(ranks: list[int], seconds: float, gone: float) -> list[int]:
    """Stop the processes of `ranks` and let them go on in turn; return what all then exchange."""
    pids = _ready(gone)

    def act() -> None:
        for number, order in ((signal.SIGSTOP, ranks), (signal.SIGCONT, ranks[::-1])):
            # the last of them has heard of the others, and wakes first
            for rank in order:
                os.kill(pids[rank], number)
                time.sleep(0.25)
            time.sleep(seconds if number == signal.SIGSTOP else 0)

    _from_outside(act)
    time.sleep(seconds + 1)  # a verdict would end the process
    return collectives.gather_objects(collectives.rank() + 10)


def never_goes_on(gone: float) -> None:
    """Stop the process of rank 1 for ever; it is killed once rank 0 has ended."""
    pids = _ready(gone)

    def act() -> None:
        os.kill(pids[1], signal.SIGSTOP)
        while os.getppid() == pids[0]:
            time.sleep(0.1)
        os.kill(pids[1], signal.SIGKILL)

    _from_outside(act)
    time.sleep(60 * collectives.rank())  # rank 1 must not arrive before it is stopped
    collectives.barrier()
