"""Memory of this process: its use, and the peak in each phase of the run."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from wandistiller.distributed import device
from wandistiller.utils.files import write_json
from wandistiller.utils.logging import current
from wandistiller.utils.system_memory import GIB, read_sizes


class Usage(NamedTuple):
    """Memory of a process in bytes."""

    host: int
    """CPU memory; pages that the ranks of a node share count in full on each.

    Pages of mapped files that came after the libraries, such as weights, do not: the system takes them back.
    """
    host_peak: int
    """Peak of `host` since the phase began."""
    allocated: int = 0
    """Accelerator memory in tensors."""
    reserved: int = 0
    """Accelerator memory held by torch's allocator, tensors included."""
    peak: int = 0
    """Peak of `reserved` since the phase began."""


peaks: dict[str, Usage] = {}
"""Largest numbers in each phase that has ended."""


LATER = 128 * 2**20
"""Pages of libraries that are mapped after the first reading."""


@cache
def _libraries() -> int:
    """Return the bytes of mapped files at the first reading, which are libraries."""
    return read_sizes(Path("/proc/self/status"))["RssFile"]


def read() -> Usage:
    sizes = read_sizes(Path("/proc/self/status"))
    files = max(0, sizes["RssFile"] - _libraries() - LATER)
    # the system keeps no peak without them: those of now are taken from it
    host = Usage(sizes["VmRSS"] - files, max(sizes["VmRSS"], sizes["VmHWM"]) - files)
    held = device.held_memory()
    return host._replace(allocated=held.allocated, reserved=held.reserved, peak=held.most_reserved)


@contextmanager
def within(phase: str) -> Iterator[None]:
    """Enter a phase of the run, with its own peaks, and return to the outer one, but not after an error."""
    outer = current.phase
    _close()
    current.phase = phase
    yield
    _close()
    current.phase = outer


def trim() -> None:
    """Return freed memory to the system: glibc keeps blocks under 32 MiB, and most tensors are smaller."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _close() -> None:
    """Store the peaks of the phase that ends and reset them; where the system refuses, they carry over."""
    usage = read()
    peaks[current.phase] = Usage(*map(max, usage, peaks.get(current.phase, usage)))
    trim()
    device.empty_cache()  # blocks of one phase do not fit the next, and other streams cannot take them
    reset_peaks()


def reset_peaks() -> bool:
    """Begin new peaks; return False where the system refuses, so that those of CPU memory carry over."""
    device.reset_peaks()
    with suppress(OSError):  # 5 resets the peak alone. Source: Linux, Documentation/filesystems/proc.rst
        return bool(Path("/proc/self/clear_refs").write_text("5"))
    return False


def in_gib(ranks: list[Usage]) -> dict[str, list[float]]:
    """Return the numbers of all ranks by kind, in GiB; kinds that are 0 on all ranks are left out."""
    return {
        kind: [round(n / GIB, 4) for n in numbers]
        for kind, numbers in zip(Usage._fields, zip(*ranks, strict=True), strict=True)
        if any(numbers)
    }


def worst(ranks: list[Usage]) -> tuple[int, int]:
    """Return the rank with the highest peak, and that peak: of accelerator memory where there is one."""
    most = [u.peak or u.host_peak for u in ranks]
    return most.index(max(most)), max(most)


def write(output: Path, memory: dict[str, list[Usage]]) -> None:
    """Write OUTPUT/memory.json: the peaks of each phase, rank by rank, GiB."""
    write_json(output / "memory.json", {phase: in_gib(ranks) for phase, ranks in memory.items()})


def add(output: Path, phase: str) -> None:
    """Add the peaks of a phase that only this rank went through to OUTPUT/memory.json."""
    file = output / "memory.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    write_json(file, known | {phase: in_gib([peaks[phase]])})
