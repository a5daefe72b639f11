"""A run that goes on while the test looks on, sends signals, and reads its output."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ranks import ROOT, environment

PATIENCE = 600.0
"""Seconds that a loaded machine may take for anything."""


class BackgroundRun:
    """A launcher and its ranks, or one plain process; an environment variable marks all of them."""

    def __init__(self, words: list[str], log: Path, **env: str):
        self.log, self._mark = log, f"TEST_RUN={log}".encode()
        env = environment(TEST_RUN=str(log), **env)
        with log.open("w") as out:
            streams = {"stdout": out, "stderr": out}
            self.process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **streams)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Until its output matches."""
        until = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll() is not None  # before it is read: the match may be in its last lines
            if match := re.search(pattern, self.output()):
                return match
            assert not ended and time.monotonic() < until, f"no {pattern!r} in:\n{self.output()}"
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """Those that live, launcher and all, whatever became of their parents, with their command lines."""
        words_of = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self._mark in (folder / "environ").read_bytes().split(b"\0")
                if marked and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    words_of[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it has just ended
        return words_of

    def pid_of_rank(self, rank: int) -> int:
        """The process whose environment says so; its compilers inherit it, and may have smaller pids."""
        for pid, words in self.processes().items():
            if "-m wandistiller" not in words:
                continue
            with suppress(OSError):  # it has just ended
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return pid
        raise AssertionError(f"no rank {rank} among {self.processes()}")

    def still_runs_after(self, seconds: float) -> bool:
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def end(self) -> int:
        """Wait for the launcher, and for every process of it; its exit code."""
        code = self.process.wait(timeout=PATIENCE)
        until = time.monotonic() + PATIENCE
        while orphans := self.processes():
            assert time.monotonic() < until, f"still there: {orphans}\n{self.output()}"
            time.sleep(0.1)
        return code


@contextmanager
def background_run(words: list[str], log: Path, **env: str) -> Iterator[BackgroundRun]:
    """Start it, and leave nothing of it behind."""
    running = BackgroundRun([str(w) for w in words], log, **env)
    try:
        yield running
    finally:
        for pid in running.processes():
            with suppress(ProcessLookupError):  # the end of another has ended it
                os.kill(pid, signal.SIGKILL)
        running.process.wait()
