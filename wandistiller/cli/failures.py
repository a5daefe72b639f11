"""Reports of failures: one message, an exit code, and a notice to the other ranks and to the launcher."""

import gc
import re
import sys
import traceback
from pathlib import Path

from torch.distributed import DistError

from wandistiller.checkpoint.resume import going_on
from wandistiller.cli.out_of_memory import advice, chain, is_out_of_memory
from wandistiller.cli.process import AGAIN, FAULT, NOT_FINITE, OUT_OF_MEMORY, STORAGE, WRONG_INPUT
from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.distributed.shutdown import stopping
from wandistiller.distributed.watchdog import FailureNotice, tell_torchrun
from wandistiller.planner.machine import memory_line
from wandistiller.utils.errors import ConfigError, NonFinite, Problems, StorageError
from wandistiller.utils.files import system_error
from wandistiller.utils.interrupts import Interrupted
from wandistiller.utils.logging import current, log_to_file

CODES = {ConfigError: WRONG_INPUT, NonFinite: NOT_FINITE, StorageError: STORAGE}
LOST_CONTACT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|socket", re.IGNORECASE
)
"""Words in the errors of backends when another rank is gone; some are plain RuntimeErrors."""


class Failures:
    """Reports why this rank fails, or why it follows another that did."""

    def __init__(self) -> None:
        self._job: Job | None = None

    def set_job(self, job: Job) -> None:
        """Keep the run, for advice."""
        self._job = job

    def going_on(self) -> str:
        """Say what goes on with the run, if it was stopped in order."""
        job = self._job
        return going_on(job.output, job.run.resume) if job else going_on(Path(), "auto")

    def report(self, error: BaseException) -> int:
        """Print and log the error, notify the launcher and the other ranks; return the exit code."""
        printed, for_launcher, first = None, None, collectives.rank() == 0
        where = f"rank {collectives.rank()}, {current.activity}"
        lost = isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error))
        if isinstance(error, Problems):
            code, text = CODES[type(error)], "\n".join(f"error: {p}" for p in error.problems)
            # the other ranks found the same, or rank 0's watchdog prints it
            printed = text if first else ""
            # torchrun repeats each rank's
            for_launcher = f"exit code {code}; the lines above that begin with `error:` say why"
        elif isinstance(error, Interrupted):
            code, text = error.exit_code, f"{error}, {current.activity}"
            if stopping.listens:  # all that was finished before the build is kept
                code, text = AGAIN, f"{text}; {self.going_on()}"
            printed = text if first else ""
        elif is_out_of_memory(error):
            code, text = OUT_OF_MEMORY, self._memory(error)
            print(text, file=sys.stderr, flush=True)  # at once, as the advice takes memory too
            hints = self._advice()
            for_launcher, printed = "\n".join([text, *hints]), "\n".join(hints) if first else ""
        elif refused := system_error(error):
            code, text = STORAGE, f"error: {where}: {_in_words(refused, goes_on=bool(self._job))}"
        elif (lost or isinstance(error, DistError)) and (notice := collectives.watchdog.who_failed()):
            code, text = notice.code, collectives.watchdog.message(notice)
        else:
            code, text = FAULT, f"{where}: {type(error).__name__}: {error}"
            printed = "".join(traceback.format_exception(error)) + text
        printed = text if printed is None else printed
        print(printed, end="\n" if printed else "", file=sys.stderr, flush=True)
        log_to_file(printed if code == FAULT else text)
        tell_torchrun(for_launcher or text)
        collectives.watchdog.announce_failure(code, text)
        return code

    def explain(self, notice: FailureNotice) -> str:
        """Describe another rank's failure for this rank's message: in full on rank 0; with free memory."""
        first = collectives.rank() == 0
        text = notice.text if first else notice.text.partition("\n")[0]
        if notice.code != OUT_OF_MEMORY:
            return text
        hints = self._advice() if first else []
        return "\n".join([text, memory_line(collectives.rank()), *hints])

    def _memory(self, error: BaseException) -> str:
        """The error with the state of the memory."""
        reason = str(error).strip().partition("\n")[0]
        text = f"Out of memory on rank {collectives.rank()}, {current.activity}: {reason}"
        for cause in chain(error):  # free what the frames hold, or there is no room for the advice
            cause.__traceback__ = None
        gc.collect()
        return f"{text}\n{memory_line(collectives.rank())}"

    def _advice(self) -> list[str]:
        if not self._job:
            return []
        lines = advice(self._job, preparing=current.phase == "prepare")
        return ["What helps:", *(f"  {line}" for line in lines)]


def _in_words(error: OSError, *, goes_on: bool) -> str:
    """The failure, the file, and a remedy.

    Args:
        goes_on: it is a run, which has checkpoints.
    """
    then = "the same command then goes on from the last checkpoint" if goes_on else "give the command again"
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}. A disk is full, or a file or folder went away or was changed "
        f"while it was used. Fix that; {then}."
    )
