"""The memory that this process holds: now, and at most in each phase of the run."""

import ctypes
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from wandistiller.files import write_json
from wandistiller.phase import now

GIB = 2**30
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK_ONLY = "5"
"""What CLEAR takes to forget the peak, and nothing else. Source: Linux, Documentation/filesystems/proc.rst."""


class Usage(NamedTuple):
    """Bytes."""

    host: int
    """In CPU memory; what ranks of a node share counts in full on each."""
    host_peak: int
    """The most of it since the phase began."""
    allocated: int = 0
    """Of the accelerator's memory, by tensors."""
    reserved: int = 0
    """By torch's allocator, tensors included."""
    peak: int = 0
    """The most of `reserved` since the phase began."""


peaks: dict[str, Usage] = {}
"""The greatest numbers of each phase that has ended."""


def read() -> Usage:
    """What this process holds."""
    entries = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    host, peak = (int(entries[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    if not torch.cuda.is_available():
        return Usage(host, peak)
    return Usage(host, peak, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())


@contextmanager
def within(phase: str) -> Iterator[None]:
    """A phase of the run, with peaks of its own; the phase around it goes on afterwards. After an error `now` still names it."""
    outer = now.phase
    _close()
    now.phase = phase
    yield
    _close()
    now.phase = outer


def trim() -> None:
    """Give what was freed back to the system: glibc keeps blocks of less than 32 MiB, which are most of a network's tensors."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _close() -> None:
    """Keep the peaks of the phase that ends here, and forget them where the system lets us; else the next has no less."""
    seen, before = read(), peaks.get(now.phase)
    peaks[now.phase] = Usage(*map(max, seen, before)) if before else seen
    trim()
    with suppress(OSError):
        CLEAR.write_text(PEAK_ONLY)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def in_gib(ranks: list[Usage]) -> dict[str, list[float]]:
    """Each kind of number of all ranks, GiB; without those of an accelerator where there is none."""
    return {kind: [round(n / GIB, 4) for n in numbers]
            for kind, numbers in zip(Usage._fields, zip(*ranks, strict=True), strict=True) if any(numbers)}  # fmt: skip


def worst(ranks: list[Usage]) -> tuple[int, int]:
    """The rank that holds most at its peak, and how much: of the accelerator's memory where there is one."""
    most = [u.peak or u.host_peak for u in ranks]
    return most.index(max(most)), max(most)


def write(output: Path, memory: dict[str, list[Usage]]) -> None:
    """Write OUTPUT/memory.json: the peaks of each phase, rank by rank, GiB."""
    write_json(output / "memory.json", {phase: in_gib(ranks) for phase, ranks in memory.items()})


def add(output: Path, phase: str) -> None:
    """Add to it the peaks of a phase that this rank alone has been through."""
    file = output / "memory.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    write_json(file, known | {phase: in_gib([peaks[phase]])})
