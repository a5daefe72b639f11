"""SIGTERM and SIGINT as an exception, for as long as a run does not listen to them itself."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """End of a command at a signal that came while nothing was to be saved."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def raise_on_signals() -> dict[signal.Signals, Any]:
    """Raise `Interrupted` at these signals; return the handlers until now."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    _stderr()
    # an ignored one stays so, as in a shell's background job
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, _raise) for number in heard}


def default_signals() -> None:
    """End at these signals at once, without Python code: the command has ended."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


_before_build: list[set[int]] = []
"""The processes that this one had started before the build that runs, if one does."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at these signals in here, where compilers may run, and end those with it."""
    before = raise_on_signals()
    _before_build.append(_descendants())
    try:
        yield
    finally:
        _before_build.pop()
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_build() -> None:
    """Raise `Interrupted` in the main thread if a build runs there, for a request that sends no signal."""
    if _before_build:
        os.kill(os.getpid(), signal.SIGTERM)


def end_compilers() -> None:
    """Kill what the build in `interruptible` has started, if one runs.

    All are stopped first, so that none starts another; ninja's own children have process groups of their own,
    and outlive it.
    """
    if not _before_build:
        return
    earlier, stopped = _before_build[-1], set()
    while new := _descendants() - earlier - stopped:
        stopped |= new
        _send(new, signal.SIGSTOP)
    _send(stopped, signal.SIGKILL)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def process_stat(pid: int) -> tuple[str, int]:
    """Return the state and the parent's id of a process of this machine; Z and 0 if it has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(parent)
    except OSError:
        return "Z", 0


@cache
def _stderr() -> int:
    """Return a descriptor of stderr as it is at the first call: deepspeed 0.19.8 redirects 2 while it tests
    the compiler."""
    return os.dup(2)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    interrupted = Interrupted(number)
    end_compilers()  # before Python kills the first of them alone
    while frame:  # a library whose import ends half-way raises anything: torch 2.13 a RecursionError
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(_stderr(), f"{interrupted}\n".encode())
            os._exit(interrupted.exit_code)
        frame = frame.f_back
    raise interrupted
