"""What this process is doing, in words: for the message of a failure, for the other ranks' watch, for the debug log."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wandistiller.logs import keep, log

IN_EVERY_STEP = ("step ", "finishing step ")
"""How what is done again and again begins: too much for a file."""


@dataclass(slots=True)
class Phase:
    """Where the main thread is; only it writes, other threads may read."""

    what: str = "starting"
    phase: str = "start"
    """Of the run: start, prepare, load, train, checkpoint, draw, export."""
    moves: int = 0
    """Grows with every sign of life."""
    since: float = field(default_factory=time.monotonic)
    """Seconds on the monotonic clock, which a change of the wall clock does not touch."""
    changed: Callable[[], None] | None = None
    """Called after each change of `what`."""


now = Phase()


def doing(what: str) -> None:
    """Say what begins here."""
    now.what = what
    alive()
    log.debug("doing: %s", what)
    if not what.startswith(IN_EVERY_STEP):
        keep(f"doing: {what}")
    if now.changed:
        now.changed()


def alive() -> None:
    """Give a sign of life within a long phase."""
    now.moves += 1
    now.since = time.monotonic()
