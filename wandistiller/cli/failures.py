"""Reports of failures: one message, an exit code, a notice to the other ranks and to the launcher, advice."""

import errno
import gc
import re
import sys
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.distributed import DistError

from wandistiller.checkpoint.resume import going_on
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
UNDERWAY = {"train", "draw", "checkpoint", "export"}
"""Phases whose input was right when the run began."""
LOST_CONTACT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|socket", re.IGNORECASE
)
"""Words in the errors of backends when another rank is gone; some are plain RuntimeErrors."""
OUT_OF_MEMORY_MESSAGE = re.compile(
    r"out of memory"  # torch; CUDA, as cudaErrorMemoryAllocation; NCCL: Cuda failure 2 'out of memory'
    r"|failed to CUDA [cm]alloc"  # NCCL 2.28
    r"|(can't|cannot|unable to) allocate memory|not enough memory"  # torch's CPU allocator, mmap, the system
    r"|could not create a (primitive|memory object)"  # oneDNN
    r"|failed to map segment|Resource temporarily unavailable"  # the dynamic linker; a new thread's stack
    r"|std::bad_alloc|cudaErrorMemoryAllocation|CU[A-Z]+_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Messages of libraries that are out of memory and raise another error, such as RuntimeError."""
GOES_ON = "The same command then goes on from the last checkpoint."
SHOWN = 3
"""Number of flags in an advice."""
PLAN = "`wandistiller plan` with the same recipe and flags says what takes how much, and which JSONs fit"


class Failures:
    """Reports why this rank fails, or why it follows another that did."""

    def __init__(self) -> None:
        self.job: Job | None = None
        """The run, once it has begun."""

    def going_on(self) -> str:
        """Say what goes on with the run, if it was stopped in order."""
        return going_on(self.job.output, self.job.run.resume) if self.job else going_on(Path(), "auto")

    def report(self, error: BaseException) -> int:
        """Print and log the error, notify the launcher and the other ranks; return the exit code."""
        printed, for_launcher, first = None, None, collectives.rank() == 0
        where = f"rank {collectives.rank()}, {current.activity}"
        lost = isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error))
        if isinstance(error, Problems):
            code, text = CODES[type(error)], "\n".join(f"error: {p}" for p in error.problems)
            if code == WRONG_INPUT and self.job and current.phase in UNDERWAY:
                code, text = STORAGE, "\n".join(f"error: {where}: {p} {GOES_ON}" for p in error.problems)
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
            code, text = STORAGE, f"error: {where}: {_in_words(refused, goes_on=bool(self.job))}"
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
        return "\n".join([text, memory_line(collectives.rank()), *(self._advice() if first else [])])

    def _memory(self, error: BaseException) -> str:
        """The error with the state of the memory."""
        reason = str(error).strip().partition("\n")[0]
        text = f"Out of memory on rank {collectives.rank()}, {current.activity}: {reason}"
        for cause in chain(error):  # free what the frames hold, or there is no room for the advice
            cause.__traceback__ = None
        gc.collect()
        return f"{text}\n{memory_line(collectives.rank())}"

    def _advice(self) -> list[str]:
        if not self.job:
            return []
        lines = advice(self.job, preparing=current.phase == "prepare")
        return ["What helps:", *(f"  {line}" for line in lines)]


def _in_words(error: OSError, *, goes_on: bool) -> str:
    """Return the failure, the file, and a remedy; a run `goes_on` from its checkpoints."""
    then = GOES_ON if goes_on else "Then give the command again."
    where = f"{error.filename}: " if error.filename else ""
    return (
        f"{where}{error.strerror or error}. A disk is full, or a file or folder went away or was changed "
        f"while it was used. Fix that. {then}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    return any(
        isinstance(e, MemoryError | torch.OutOfMemoryError)
        or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
        or OUT_OF_MEMORY_MESSAGE.search(str(e))
        for e in chain(error)
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes, and the errors during whose handling they were raised; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def advice(job: Job, preparing: bool = False) -> list[str]:
    """Return the first flags that a run out of memory lacks, those that cost least first, and PLAN.

    While the cache is being filled, `preparing`, there is no student.
    """
    return [*islice(_flags(job, preparing), SHOWN), PLAN]


def _flags(job: Job, preparing: bool) -> Iterator[str]:
    if preparing and job.run.prepare_batch > 1:
        yield "--prepare_batch 1"
    policy = job.student_engine.recompute
    if not preparing and (policy is None or policy.checkpoint_but_last):
        yield "--gradient_checkpointing"
    if job.teacher.engine.dtype is torch.float32:
        yield "--teacher_dtype bfloat16"
    if not preparing and job.batch.micro > 1:
        yield "--batch_size 1"
    yield "--deepspeed_config auto --teacher_deepspeed_config auto: the JSONs and micro-batch that fit"
    yield "--num_frames, --height, --width: fewer frames or pixels"
    yield "--student_config FILE: a student of fewer layers"
