"""Builds of DeepSpeed's C++ extensions, which torch compiles at their first use: one process at a time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.cpp_extension import _get_build_directory

from wandistiller.utils.files import take_lock
from wandistiller.utils.interrupts import interruptible
from wandistiller.utils.logging import heartbeat, log

WAIT = 1.0
"""Seconds between looks at a build of another process."""


@contextmanager
def sole_builder(name: str) -> Iterator[None]:
    """Wait until no other process of ours builds or loads the extension `name`; log a build and its seconds.

    The lock is the kernel's, which frees it when a process is killed. torch's own is a file that a killed
    build leaves, and on which the next waits for ever (torch 2.13): whoever holds ours may remove it.
    """
    folder = Path(_get_build_directory(name, False))
    with (folder.parent / f".{name}.lock").open("a") as file, interruptible():
        is_waiting = False
        while (is_locked := take_lock(file)) is False:
            if not is_waiting:
                log.info("build     waiting for the process that builds or loads %s", name)
            is_waiting = True
            heartbeat()
            time.sleep(WAIT)
        if is_locked:  # None on a file system without locks
            (folder / "lock").unlink(missing_ok=True)
        began, is_built = time.monotonic(), (folder / f"{name}.so").is_file()
        if not is_built:
            log.warning("build     DeepSpeed's %s is compiled into %s: minutes, once", name, folder)
        yield
        if not is_built:
            log.warning("build     %s took %.0f s", name, time.monotonic() - began)
