"""Out-of-memory errors of all libraries; `cli.failures` reports them."""

import errno
import re
from collections.abc import Iterator

import torch

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
    return any(_matches(e) for e in chain(error))


def _matches(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or MESSAGE.search(str(error)) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes, and the errors during whose handling they were raised; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
