"""What a killed process leaves of DeepSpeed's C++ parts, which torch compiles when they are first used."""

import os
import time
from pathlib import Path

from wandistiller.logs import log

STALE = 900.0
"""Seconds after which no compiler can still be at work behind a lock; the longest part takes some minutes."""


def forget_killed_builds() -> None:
    """Remove the locks of builds that were killed, on which torch waits for ever (torch 2.13); tell of those that may go on."""
    for lock in _locks():
        try:
            age = time.time() - lock.stat().st_mtime
            if age > STALE:
                lock.unlink()
                log.warning("build     %s was left by a build that was killed; it is removed", lock)
            else:
                log.warning("build     %s is being built by another process, since %.0f s; if there is none, remove %s",
                            lock.parent.name, age, lock)  # fmt: skip
        except OSError:  # it has just ended
            continue


def _locks() -> list[Path]:
    """In the folder that torch builds in: one for each part, with one above it for each Python where it is the default."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(given or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torch_extensions")
    return sorted(folder.glob("*/lock" if given else "*/*/lock"))
