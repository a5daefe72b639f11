"""SIGTERM and SIGINT as an exception, for as long as a run does not listen to them itself."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

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
    # an ignored one stays so, as in a shell's background job
    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, _raise) for number in heard}


def default_signals() -> None:
    """End at these signals at once, without Python code: the command has ended."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at these signals in here, where a compiler may run for minutes."""
    before = raise_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def process_stat(pid: int) -> tuple[str, int]:
    """Return the state and the parent's id of a process of this machine; Z and 0 if it has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(parent)
    except OSError:
        return "Z", 0


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    interrupted = Interrupted(number)
    while frame:  # a library whose import ends half-way raises anything: torch 2.13 a RecursionError
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, f"{interrupted}\n".encode())
            os._exit(interrupted.exit_code)
        frame = frame.f_back
    raise interrupted
