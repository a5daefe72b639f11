"""Free CPU memory and disk, as the system and control groups allow; settings of memory's allocators."""

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GIB = 2**30


def amount(nbytes: float) -> str:
    """Write a number of bytes in GiB, below one in MiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


SYSTEM = 0.10
"""Share of free CPU memory and disk kept in reserve for data, file cache and other processes."""
PIECES = 0.08
"""Share of an accelerator's free memory kept in reserve for its allocator's fragmentation."""
LEAST = 2 * GIB
"""Smallest reserve in bytes, unless it is over a quarter of the free memory."""


def memory_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the limits on this process's memory, in bytes, and their source; `root` has proc/ and sys/."""
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        yield space, "of address space, ulimit -v"
    if groups := [allowed for allowed, _ in _groups(root)]:
        yield min(groups), "control group"


def read_sizes(file: Path) -> dict[str, int]:
    """Read the sizes in a file of proc/, in bytes."""
    entries = (line.partition(":") for line in file.read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, _, value in entries if value.endswith(" kB")}


def host_free(root: Path = Path("/")) -> int:
    """Return the free bytes of CPU memory by the system's and control groups' files in `root`."""
    return min([read_sizes(root / "proc/meminfo")["MemAvailable"], *(free for _, free in _groups(root))])


def _groups(root: Path) -> list[tuple[int, int]]:
    """List the limit and free bytes of each control group above this process, version 1 or 2.

    The file cache counts as free: the kernel drops it before it refuses memory. Memory files (shmem) do not.
    """
    groups = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        lowest = top / path.lstrip("/")  # is not there in a container that sees its own group as `top`
        above = (group for group in (lowest, *lowest.parents) if group.is_relative_to(top))
        for group in (group for group in above if (group / limit).is_file()):
            # over `high` the kernel takes pages back
            files = (group / name for name in (limit, "memory.high"))
            limits = [file.read_text().strip() for file in files if file.is_file()]
            if allowed := min((int(n) for n in limits if n != "max"), default=0):
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                cache = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
                groups.append((allowed, max(0, allowed - int((group / used).read_text()) + cache)))
    return groups


def disk_free(path: Path) -> int:
    return shutil.disk_usage(_nearest(path)).free


def disk(path: Path) -> int:
    return _nearest(path).stat().st_dev


def _nearest(path: Path) -> Path:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())


def reserve(free: int, share: float) -> float:
    """Return the part of `free` bytes to keep in reserve."""
    return max(share * free, min(LEAST, free / 4))


def room_of_a_rank(host_free: int, ranks_on_node: int) -> int:
    """Return the bytes of CPU memory that each rank of a node may take, given its free bytes."""
    return int(host_free - reserve(host_free, SYSTEM)) // ranks_on_node


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that hold them."""
PINNED_ROUNDED = 1
"""MiB up to which page-locked memory is allocated in powers of two."""
ALLOCATOR_SETTINGS = f"expandable_segments:True,pinned_max_round_threshold_mb:{PINNED_ROUNDED}"
"""Segments that grow leave no fragments too small to use. Page-locked blocks over 1 MiB take their own size,
not the next power of two, which for an offloaded optimizer is many GiB more (torch 2.13)."""
FREED_KEPT = 512 * 2**20
"""Bytes of freed memory that the C library keeps at most, at the end of its heap."""
C_LIBRARY = {-3: 32 * 2**20, -1: FREED_KEPT}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of glibc's mallopt(3), in bytes: smaller blocks are reused, and freed
memory at the end of the heap is kept up to the second. By its own rules a training step on a CPU gives its
activations back to the system and takes them again: up to 60,000 page faults a step of the quick start, which
is 5 to 20 % of its time (glibc 2.36, tests/bench/overhead.py). The end of a phase returns all of it."""


def set_allocators() -> None:
    """Set allocators for this process, torch's also for those that it starts; before torch is imported."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = ALLOCATOR_SETTINGS
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        with suppress(OSError, AttributeError):  # another C library
            for parameter, value in C_LIBRARY.items():
                ctypes.CDLL(None).mallopt(parameter, value)
