"""What a machine has free, and what of it a run would take."""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wandistiller import distributed
from wandistiller.config import read_json
from wandistiller.deepspeed_json import with_dtype
from wandistiller.memory import Bytes

GIB = 2**30
PIECES = 0.08
"""Share of the free memory of an accelerator that is kept in reserve for what its allocator leaves in pieces too small to use."""
SYSTEM = 0.10
"""Share of the free CPU memory and disk that is kept in reserve for data, file cache and other processes."""
LEAST = 2 * GIB
"""The least size of such a reserve, where that is not over a quarter of what is free."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run can still have, in bytes, and how many share it."""

    device_free: int | None
    """On the accelerator of the rank with the least; None where there are none."""
    host_free: int
    """CPU memory of the node with the least."""
    disk_free: int
    """On the swap folder's disk, of the node with the least."""
    ranks: int
    ranks_on_node: int
    """On the node with the most."""
    files: int = 0
    """That the run will write to the swap folder's disk; they leave so much less room for what is swapped."""
    device_total: int | None = None
    """Of an accelerator, with what others take of it now; None where it is not known."""

    @property
    def device_size(self) -> int | None:
        """By which its kind is told."""
        return self.device_total or self.device_free


def this_machine(swap_path: Path) -> Machine:
    """Measure what is free now. Collective; if there are other ranks, after `distributed.init`."""
    device = distributed.device()
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (None, None)
    mine = Machine(free, host_free(), disk_free(swap_path), distributed.world_size(), len(distributed.node_peers()),
                   device_total=total)  # fmt: skip
    found = distributed.gather_objects(mine)
    return Machine(
        device_free=None if free is None else min(m.device_free for m in found),
        host_free=min(m.host_free for m in found),
        disk_free=min(m.disk_free for m in found),
        ranks=mine.ranks,
        ranks_on_node=max(m.ranks_on_node for m in found),
        device_total=None if total is None else min(m.device_total for m in found),
    )


def machine_now() -> Machine:
    """What this rank by itself sees of its machine, when it can ask no other; the launcher knows the ranks on it."""
    device = distributed.device()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's, deepspeed's
    counted = (os.environ.get(name) for name in names)
    here = int(next(filter(None, counted), distributed.world_size()))
    return Machine(free, host_free(), disk_free(Path()), distributed.world_size(), here)


def memory_line(rank: int, root: Path = Path("/")) -> str:
    """What this process has of memory, and what there is, in one line.

    Args:
        root: the folder of proc/ and sys/.
    """
    said = ["no accelerator"]
    if torch.cuda.is_available():
        device = distributed.device()
        free, total = torch.cuda.mem_get_info(device)
        numbers = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), total, free
        words = ("allocated", "reserved", "in all", "free")
        said = [f"GPU {device.index}: " + ", ".join(f"{n / GIB:.2f} GiB {word}" for n, word in zip(numbers, words, strict=True))]
    own, system = _kib(root / "proc/self/status"), _kib(root / "proc/meminfo")
    limits = [f"{n / GIB:.2f} GiB ({where})" for n, where in _limits(root) if n < system["MemTotal"]]
    said += [f"this process: {own['VmRSS'] / GIB:.2f} GiB of CPU memory, {own['VmSize'] / GIB:.2f} GiB of address space",
             f"limited to {', '.join(limits)}" if limits else "no limit",
             f"machine: {system['MemTotal'] / GIB:.2f} GiB, {host_free(root) / GIB:.2f} GiB free for it"]  # fmt: skip
    return f"rank {rank}: {'; '.join(said)}"


def _limits(root: Path) -> Iterator[tuple[int, str]]:
    """The limits on this process's memory, in bytes, and who sets them."""
    if (space := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        yield space, "of address space, ulimit -v"
    if groups := [allowed for allowed, _ in _groups(root)]:
        yield min(groups), "control group"


def _kib(file: Path) -> dict[str, int]:
    """The entries of a file of proc/ that are sizes, in bytes."""
    entries = (line.partition(":") for line in file.read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, _, value in entries if value.endswith(" kB")}


def host_free(root: Path = Path("/")) -> int:
    """Bytes of CPU memory that this process and its like can still take, as the system and its control groups say.

    Args:
        root: the folder of proc/ and sys/.
    """
    return min([_kib(root / "proc/meminfo")["MemAvailable"], *(free for _, free in _groups(root))])


def _groups(root: Path) -> list[tuple[int, int]]:
    """The limit of each control group above this process, version 1 or 2, and what it leaves of it.

    Its file cache counts as free: the kernel gives it up before it refuses memory. Memory files (shmem) are no part of it.
    """
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        own = top / path.lstrip("/")  # is not there in a container that sees its own group as `top`
        for group in (g for g in (own, *own.parents) if g.is_relative_to(top) and (g / limit).is_file()):
            said = [(group / file).read_text().strip() for file in (limit, "memory.high") if (group / file).is_file()]
            if allowed := min((int(n) for n in said if n != "max"), default=0):  # over `high` the kernel takes pages back
                stat = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                cache = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
                found.append((allowed, max(0, allowed - int((group / used).read_text()) + cache)))
    return found


def disk_free(path: Path) -> int:
    """Bytes that we may still write to the file system on which `path` is, or will be."""
    return shutil.disk_usage(_nearest(path)).free


def disk(path: Path) -> int:
    """The number of the file system on which `path` is, or will be."""
    return _nearest(path).stat().st_dev


def _nearest(path: Path) -> Path:
    """The nearest folder above that is there."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())


def reserve(free: int, share: float) -> float:
    """What of `free` bytes is not to be taken."""
    return max(share * free, min(LEAST, free / 4))


class Demand(NamedTuple):
    """What would be taken from one kind of memory, in bytes."""

    where: str
    need: int
    free: int
    share: float
    """Of `free`, to be kept in reserve."""

    @property
    def reserve(self) -> float:
        return reserve(self.free, self.share)

    @property
    def over(self) -> float:
        """How much is missing; below 0, how much is left beside the reserve."""
        return self.need - (self.free - self.reserve)

    @property
    def is_met(self) -> bool:
        return self.over <= 0

    def __str__(self) -> str:
        return f"{self.need / GIB:.1f} GiB {self.where}"

    @property
    def supply(self) -> str:
        return f"{self.free / GIB:.1f} GiB {self.where} ({self.reserve / GIB:.1f} of them kept in reserve)"


def room_of_a_rank(host_free: int, ranks_on_node: int) -> int:
    """Bytes of CPU memory that each of these ranks may take, of so many that are free on their node."""
    return int(host_free - reserve(host_free, SYSTEM)) // ranks_on_node


def demands(rank: Bytes, machine: Machine) -> list[Demand]:
    """What ranks that take `rank` each would take from each kind of memory of `machine`."""
    device, here = rank.device + rank.live, machine.ranks_on_node
    if machine.device_free is None:
        found = [Demand("of CPU memory", here * (device + rank.host) + rank.node, machine.host_free, SYSTEM)]
    else:
        found = [Demand("on each GPU", device, machine.device_free, PIECES),
                 Demand("of CPU memory", here * rank.host + rank.node, machine.host_free, SYSTEM)]  # fmt: skip
    return [*found, Demand("of disk", rank.disk and here * rank.disk + machine.files, machine.disk_free, SYSTEM)]


def placed(name: str, dtype_name: str) -> dict[str, Any]:
    """The teacher JSON that we ship as `name`, in the given precision."""
    return with_dtype(read_json(f"ds_configs/teacher/{name}.json"), dtype_name)


def candidates(machine: Machine) -> list[str]:
    """Placements to choose from, the fastest first, without those that one rank would not gain from."""
    if machine.device_free is not None:
        names = ["replicated", "sharded_node", "sharded", "zero_inference_cpu_node", "zero_inference_cpu", "zero_inference_nvme",
                 "host_cpu"]  # fmt: skip
        nodes = machine.ranks // machine.ranks_on_node
        single = {"sharded": machine.ranks, "sharded_node": min(nodes, machine.ranks_on_node), "zero_inference_cpu_node": nodes}
    else:  # ranks on CPUs that share a copy need no communication
        names = ["replicated", "host_cpu", "sharded", "zero_inference_nvme"]
        single = {"host_cpu": machine.ranks_on_node, "sharded": machine.ranks}
    return [name for name in names if single.get(name) != 1]
