"""Stale locks of DeepSpeed's C++ extensions, which torch compiles when they are first used."""

import os
import time
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from wandistiller.utils.logging import log

STALE = 900.0
"""Seconds after which no compiler can still be at work behind a lock; the longest part takes some minutes."""


def remove_stale_locks() -> None:
    """Remove locks of killed builds, on which torch 2.13 waits for ever; log those that may still go on."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    pattern = "*/lock" if given else "*/*/lock"  # the default folder has one for each Python
    for lock in sorted(Path(given or get_default_build_root()).glob(pattern)):
        try:
            age = time.time() - lock.stat().st_mtime
            if age > STALE:
                lock.unlink()
                log.warning("build     %s was left by a build that was killed; it is removed", lock)
            else:
                name = lock.parent.name
                text = "build     %s is built by another process, since %.0f s; if there is none, remove %s"
                log.warning(text, name, age, lock)
        except OSError:  # it has just ended
            continue
