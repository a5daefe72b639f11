"""Which errors mean that memory ran out, whatever library raised them, and which memory it was."""

import errno
import re
from collections.abc import Iterator
from enum import Enum

import torch


class Spent(Enum):
    """The kind of memory that ran out; without an accelerator all is the host's."""

    DEVICE = "accelerator memory"
    HOST = "CPU memory"


SAID = re.compile(
    r"out of memory"  # torch; CUDA, as cudaErrorMemoryAllocation; NCCL: Cuda failure 2 'out of memory'
    r"|(can't|cannot|unable to) allocate memory|not enough memory"  # torch's CPU allocator, mmap, the system
    r"|std::bad_alloc|cudaErrorMemoryAllocation|CU[A-Z]+_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Words of libraries that raise it as another error, such as RuntimeError."""
LIBRARIES = re.compile(r"CU[A-Z]+_STATUS_ALLOC_FAILED|Cuda failure", re.IGNORECASE)
"""Words of CUDA's own libraries and NCCL, which allocate on the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it came from, means that memory ran out."""
    return any(_says_so(e) for e in chain(error))


def what_ran_out(error: BaseException) -> Spent:
    """Which memory an error means for which `is_out_of_memory` is true."""
    found = next(e for e in chain(error) if _says_so(e))
    if isinstance(found, torch.OutOfMemoryError) or LIBRARIES.search(str(found)):
        return Spent.DEVICE
    # torch's allocator raises its own error; CUDA's is left for page-locked host memory, unless the device is full
    if "cuda" in str(found).lower() and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Spent.DEVICE if free < 0.02 * total else Spent.HOST
    return Spent.HOST


def _says_so(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or SAID.search(str(error)) is not None


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from, and what was being handled; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
