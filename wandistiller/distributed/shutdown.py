"""Graceful shutdown: at a signal, at the file OUTPUT/STOP, or when the launcher has ended."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Slurm's `--signal=USR1@120` sends SIGUSR1 before a pre-emption or the end of the time limit."""
SAME_REQUEST_SECONDS = 3.0
"""Launchers forward a signal that every process already got; only a later one means "stop now"."""
TORCHRUN = ("torchrun", "torch.distributed.run", "torch/distributed/run")
LAUNCHERS = ("deepspeed", *TORCHRUN, "mpirun", "mpiexec", "orted", "hydra_pmi_proxy")
STARTED_BY = {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"}
"""Variables that torchrun and deepspeed's launcher set for the processes that they start."""
STOP = "STOP"


class Stopped(Exception):
    """End of a run on request, with everything saved; its text is the time of it."""


class ShutdownListener:
    """Receives requests to stop this rank; `reason` is the first of them."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._since = 0.0
        self._stop_file: Path | None = None
        self._launchers: list[tuple[int, str]] = []
        self._handlers: dict[signal.Signals, Any] = {}
        """The process's own, to be restored."""

    def remember_launchers(self) -> None:
        """Find the launchers of this process, to notice when they end; call it before anything takes time."""
        self._launchers = _launchers()
        pid, command = self._launchers[-1] if self._launchers else (0, "")  # the outermost
        # deepspeed has two, of which the first starts the second
        lost = "deepspeed.launcher.launch" in command and process_stat(pid)[1] == 1
        if lost or not self._launchers and STARTED_BY & os.environ.keys():
            self.request_stop("the end of its launcher")

    def install(self, stop_file: Path | None) -> None:
        """Listen from here on; a second signal ends the process at once.

        Args:
            stop_file: a file whose appearance is a request; None on ranks that need not poll it.
        """
        self._stop_file = stop_file
        if stop_file:
            stop_file.unlink(missing_ok=True)  # meant for an earlier run
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._handlers[number] = signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Restore the process's own signal handlers and forget all requests: the run has ended."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.reason, self._stop_file, self._launchers, self._handlers = None, None, [], {}

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.reason and time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.request_stop(signal.Signals(number).name)

    def request_stop(self, reason: str) -> None:
        """Stop at the end of the step in flight."""
        if not self.reason:
            self.reason, self._since = reason, time.monotonic()

    def poll(self) -> None:
        """Check the requests that send no signal: the stop file, and launchers that have ended."""
        if self._stop_file and self._stop_file.exists():
            self._stop_file.unlink(missing_ok=True)
            self.request_stop(f"{self._stop_file}")
        for pid, command in self._launchers:
            if _command_line(pid) != command:
                self.request_stop(f"the end of its launcher (process {pid})")


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
        _, pid = process_stat(pid)
    return launchers


def process_stat(pid: int) -> tuple[str, int]:
    """Return the state and the parent's id of a process of this machine; Z and 0 if it has ended."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return state, int(parent)
    except OSError:
        return "Z", 0


def _command_line(pid: int) -> str:
    """Return the command line of a process; empty for one that has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
