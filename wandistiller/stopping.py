"""Ends a run in order when it is asked to: by a signal, by the file OUTPUT/STOP, or because its launcher has gone."""

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what Slurm's `--signal=USR1@120` sends before a pre-emption or the end of the time limit."""
SAME_REQUEST_SECONDS = 3.0
"""Launchers pass a signal on that the terminal sent to all; only one that comes later means `at once`."""
LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed.run", "torch/distributed/run", "mpirun", "mpiexec", "orted",
             "hydra_pmi_proxy")  # fmt: skip
STARTED_BY = {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"}
"""Variables that torchrun and deepspeed's launcher give to what they start."""
STOP = "STOP"


class Stopped(Exception):
    """The run ended early, as it was asked to, with everything saved. Says by what."""


class Stopping:
    """Whether this rank was asked to stop, and by what."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._since = 0.0
        self._stop_file: Path | None = None
        self._launchers: list[tuple[int, str]] = []
        self._before: dict[signal.Signals, Any] = {}

    def remember_launchers(self) -> None:
        """Know those that started this process, to see when they end; to be called before anything takes time."""
        self._launchers = _launchers()
        first = self._launchers[-1:]  # deepspeed has two, of which the first starts the second
        lost = any("deepspeed.launcher.launch" in words and _parent(pid) == 1 for pid, words in first)
        if lost or not first and STARTED_BY & os.environ.keys():
            self.ask("the end of its launcher")

    def install(self, stop_file: Path | None) -> None:
        """Listen from here on; a second signal ends the process at once.

        Args:
            stop_file: where a person may put a file; None on ranks that need not look.
        """
        self._stop_file = stop_file
        if stop_file:
            stop_file.unlink(missing_ok=True)  # meant for an earlier run
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._on_signal)

    def release(self) -> None:
        """Listen no more, and forget what was asked: the run has ended, the process may go on."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.__init__()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.reason and time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.ask(signal.Signals(number).name)

    def ask(self, reason: str) -> None:
        """Stop at the end of the step in flight."""
        if not self.reason:
            self.reason, self._since = reason, time.monotonic()

    def look(self) -> None:
        """See whether somebody asked in a way that no signal tells."""
        if self._stop_file and self._stop_file.exists():
            self._stop_file.unlink(missing_ok=True)
            self.ask(f"{self._stop_file}")
        for pid, words in self._launchers:
            if _words(pid) != words:
                self.ask(f"the end of its launcher (process {pid})")


stopping = Stopping()


def _launchers() -> list[tuple[int, str]]:
    """The processes above this one that are launchers, with their command lines, by which they are known."""
    found, pid = [], os.getppid()
    while pid > 0:  # in a container a launcher may be process 1
        words = _words(pid)
        program = words.partition("\0")[0].rpartition("/")[2]
        if program.startswith(("python", *LAUNCHERS)) and any(name in words for name in LAUNCHERS):  # no shell that names one
            found.append((pid, words))
        pid = _parent(pid)
    return found


def _parent(pid: int) -> int:
    """The process that started another, or took it over; 0 if that has gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _words(pid: int) -> str:
    """The command line of a process; empty for one that has gone or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
