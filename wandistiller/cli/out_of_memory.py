"""Out-of-memory errors of all libraries, and advice: flags that take less, and the command that plans."""

import errno
import re
from collections.abc import Iterator
from itertools import islice

import torch

from wandistiller.config.job import Job

MESSAGE = re.compile(
    r"out of memory"  # torch; CUDA, as cudaErrorMemoryAllocation; NCCL: Cuda failure 2 'out of memory'
    r"|failed to CUDA [cm]alloc"  # NCCL 2.28
    r"|(can't|cannot|unable to) allocate memory|not enough memory"  # torch's CPU allocator, mmap, the system
    r"|could not create a (primitive|memory object)"  # oneDNN
    r"|failed to map segment|Resource temporarily unavailable"  # the dynamic linker; a new thread's stack
    r"|std::bad_alloc|cudaErrorMemoryAllocation|CU[A-Z]+_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Messages of libraries that raise another error, such as RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    return any(
        isinstance(e, MemoryError | torch.OutOfMemoryError)
        or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
        or MESSAGE.search(str(e))
        for e in chain(error)
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes, and the errors during whose handling they were raised; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


SHOWN = 3
"""Number of flags."""
PLAN = "`wandistiller plan` with the same recipe and flags says what takes how much, and which JSONs fit"


def advice(job: Job, preparing: bool = False) -> list[str]:
    """Return the first flags that a run out of memory lacks, those that cost least first, and PLAN.

    Args:
        preparing: the cache was being filled, so that there was no student yet.
    """
    return [*islice(_flags(job, preparing), SHOWN), PLAN]


def _flags(job: Job, preparing: bool) -> Iterator[str]:
    if preparing and job.run.prepare_batch > 1:
        yield "--prepare_batch 1"
    if not preparing and not job.student_engine.recompute:
        yield "--gradient_checkpointing"
    if job.teacher.engine.dtype is torch.float32:
        yield "--teacher_dtype bfloat16"
    if not preparing and job.batch.micro > 1:
        yield "--batch_size 1"
    yield "--deepspeed_config auto --teacher_deepspeed_config auto: the JSONs and micro-batch that fit"
    yield "--num_frames, --height, --width: fewer frames or pixels"
    yield "--student_config FILE: a student of fewer layers"
