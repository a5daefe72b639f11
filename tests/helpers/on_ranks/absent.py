"""Ranks that do not meet, for test_watchdog.py: one fails, and times are short."""

import os
import sys
from datetime import timedelta

from wandistiller.cli.failures import Failures
from wandistiller.distributed import collectives, gpus, watchdog

CODE = 7
"""Exit code of the rank that fails."""


def fail(*_: object) -> None:
    os._exit(CODE)


if __name__ == "__main__":
    collectives.MEETING_TIMEOUT = timedelta(seconds=2)
    watchdog.POLL_SECONDS, watchdog.HEARTBEAT_SECONDS, watchdog.GRACE_SECONDS = 0.1, 0.1, 0.3
    watchdog.GONE_SECONDS = 3.0
    number, when = int(sys.argv[1]), sys.argv[2]
    if collectives.rank() == number and when == "before they meet":
        fail()
    if collectives.rank() == number:
        gpus.require_own_gpu = fail
    try:
        collectives.init("warning")
    except RuntimeError as error:
        os._exit(Failures().report(error))
