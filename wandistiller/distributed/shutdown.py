"""Graceful shutdown: at a signal, at the file OUTPUT/STOP, or when the launcher has ended."""

import logging
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from wandistiller.utils import interrupts
from wandistiller.utils.logging import current, log, log_to_file

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Slurm's `--signal=USR1@120` sends SIGUSR1 before a pre-emption or the end of the time limit."""
SAME_REQUEST_SECONDS = 3.0
"""Launchers forward a signal that every process already got; only a later one is another request."""
ENDS_AT = 3
"""Number of requests by one signal at which a process ends without saving."""
TORCHRUN = ("torchrun", "torch.distributed.run", "torch/distributed/run")
LAUNCHERS = ("deepspeed", *TORCHRUN, "accelerate", "mpirun", "mpiexec", "orted", "hydra_pmi_proxy")
STOP = "STOP"


class Stopped(Exception):
    """End of a run on request, with everything saved; its text is the time of it."""


class ShutdownListener:
    """Receives requests to stop this rank; `reason` is the first of them."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._stop_file: Path | None = None
        self._launchers: list[tuple[int, str]] = []
        self._handlers: dict[signal.Signals, Any] = {}
        """The process's own, to be restored."""
        self._wakeup = -1
        """Where the C level writes the number of each signal, at once."""
        self._requests: Counter[int] = Counter()
        """Signal -> how often it was a request, which its repetition by a launcher is not."""
        self._last: dict[int, float] = {}
        """Signal -> time of its last request."""

    def remember_launchers(self) -> None:
        """Find the launchers of this process, to notice when they end; call it before anything takes time."""
        self._launchers = _launchers()
        pid, command = self._launchers[-1] if self._launchers else (0, "")  # the outermost
        # deepspeed has two, of which the first starts the second
        lost = "deepspeed.launcher.launch" in command and interrupts.process_stat(pid)[1] == 1
        if lost:
            self.request_stop("the end of its launcher")

    @property
    def listens(self) -> bool:
        """True while a signal is a request to this run, which can be continued."""
        return bool(self._handlers)

    def install(self, stop_file: Path | None) -> None:
        """Listen from here on; the third signal ends the process at once.

        Args:
            stop_file: a file whose appearance is a request; None on ranks that need not poll it.
        """
        self._stop_file = stop_file
        if stop_file:
            stop_file.unlink(missing_ok=True)  # meant for an earlier run
        if threading.current_thread() is threading.main_thread():
            heard, self._wakeup = os.pipe()
            os.set_blocking(self._wakeup, False)
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            # the main thread may be in a matrix product or a collective for minutes
            threading.Thread(target=self._listen, args=[heard], daemon=True).start()
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._handlers[number] = signal.signal(number, lambda *_: None)  # the thread has it

    def release(self) -> None:
        """Restore the process's own signal handlers and forget all requests: the run has ended."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._wakeup >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._wakeup)  # which ends the thread
        self.reason, self._stop_file, self._launchers, self._handlers = None, None, [], {}
        self._wakeup, self._requests, self._last = -1, Counter(), {}

    def _listen(self, heard: int) -> None:
        """Count the requests by signals as they come, whatever the main thread does."""
        while numbers := os.read(heard, 1024):
            for number in numbers:
                if number in SIGNALS:
                    self._on_signal(signal.Signals(number))
        os.close(heard)

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if now - self._last.get(number, -SAME_REQUEST_SECONDS) < SAME_REQUEST_SECONDS:
            return
        self._last[number] = now
        self._requests[number] += 1
        count = self._requests[number]
        if count == 1:
            self.request_stop(number.name, "; twice more ends it now, without saving")
        elif count < ENDS_AT:
            _say(f"{number.name}: once more ends it now, without saving")
        else:
            _say(f"ended by {number.name}, without saving")
            os._exit(128 + number)

    def request_stop(self, reason: str, remark: str = "") -> None:
        """Stop at the end of the step in flight, or of the call of a network; say so, when, and `remark`."""
        if not self.reason:
            self.reason = reason
            # the part of the work that is not interrupted, with the time that it still takes, if known
            what = f"what runs now ({current.activity})"
            if current.step and current.is_of_step:
                what = f"step {current.step} and its checkpoint"
            left = current.due - time.monotonic()
            what += f", about {left:.0f} s" if left > 0 else ""
            _say(f"{reason}: stopping after {what}{remark}")

    def poll(self) -> None:
        """Check the requests that send no signal: the stop file, and launchers that have ended."""
        if self._stop_file and self._stop_file.exists():
            self._stop_file.unlink(missing_ok=True)
            self.request_stop(f"{self._stop_file}")
        for pid, command in self._launchers:
            if _command_line(pid) != command:
                self.request_stop(f"the end of its launcher (process {pid})")


def _say(text: str) -> None:
    """Log a line on the first rank of each node; on the others to their files alone."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log.log(logging.WARNING, "%s", text)
    else:
        log_to_file(text)


stopping = ShutdownListener()


def _launchers() -> list[tuple[int, str]]:
    """List the launchers among this process's ancestors: process id and command line, which identify one."""
    launchers, pid = [], os.getppid()
    while pid > 0:  # in a container a launcher may be process 1
        command = _command_line(pid)
        program = command.partition("\0")[0].rpartition("/")[2]
        # not a shell whose command line names a launcher
        if program.startswith(("python", *LAUNCHERS)) and any(name in command for name in LAUNCHERS):
            launchers.append((pid, command))
        _, pid = interrupts.process_stat(pid)
    return launchers


def _command_line(pid: int) -> str:
    """Return the command line of a process; empty for one that has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
