"""Ranks that do not meet, for test_watchdog.py: one fails, and times are short.

    absent.py FOLDER NUMBER WHEN

All wait for each other in FOLDER before, or on a busy machine one that starts late is absent too.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from wandistiller.cli.failures import Failures
from wandistiller.distributed import collectives, meeting, watchdog

CODE = 7
"""Exit code of the rank that fails."""


def fail(*_: object) -> None:
    os._exit(CODE)


if __name__ == "__main__":
    meeting.MEETING_TIMEOUT, meeting.CONNECT_TIMEOUT = timedelta(seconds=4), timedelta(seconds=3)
    meeting.SAID_AFTER = 1.0
    watchdog.POLL_SECONDS, watchdog.HEARTBEAT_SECONDS, watchdog.GRACE_SECONDS = 0.1, 0.1, 0.3
    watchdog.GONE_SECONDS = 5.0
    folder, number, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    (folder / f"{collectives.rank()}").touch()
    while len(list(folder.iterdir())) < collectives.world_size():
        time.sleep(0.01)
    if collectives.rank() == number and when == "before they meet":
        fail()
    if collectives.rank() == number:
        collectives.default_backend = fail
    try:
        collectives.init("warning")
    except RuntimeError as error:
        os._exit(Failures().report(error))
