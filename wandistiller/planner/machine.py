"""Free memory and disk of a machine, and what a run needs of each."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wandistiller.distributed import collectives
from wandistiller.distributed.device import held_memory, local_rank, memory_size, on_accelerator
from wandistiller.distributed.device import name as device_name
from wandistiller.engine.zero_memory import Bytes, Topology
from wandistiller.utils.system_memory import (
    GIB,
    PIECES,
    SYSTEM,
    amount,
    disk_free,
    host_free,
    memory_limits,
    read_sizes,
    reserve,
)


@dataclass(frozen=True, slots=True)
class Machine:
    """Free memory and disk in bytes, and the ranks that share them."""

    device_free: int | None
    """Memory of the accelerator with the least; None without accelerators."""
    host_free: int
    """CPU memory of the node with the least."""
    disk_free: int
    """Space on the swap folder's disk of the node with the least."""
    ranks: int
    ranks_on_node: int
    """Ranks of the node with the most."""
    files: int = 0
    """Bytes that the run will write to the swap folder's disk, which are not free for swapping."""
    device_total: int | None = None
    """All memory of an accelerator, used or free; None if it is not known."""
    device_name: str = ""
    """The accelerator's, such as NVIDIA H100 80GB HBM3; empty if it is not known."""

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, self.ranks_on_node, self.device_free is not None)

    @property
    def device_size(self) -> int | None:
        """Memory of an accelerator by which its kind is known."""
        return self.device_total or self.device_free


def this_machine(swap_path: Path) -> Machine:
    """Measure this machine now. Collective; if there are other ranks, after `distributed.init`."""
    own = *memory_size(), host_free(), disk_free(swap_path), len(collectives.node_peers()), device_name()
    frees, totals, hosts, disks, on_nodes, names = zip(*collectives.gather_objects(own), strict=True)
    return Machine(
        device_free=None if frees[0] is None else min(frees),
        host_free=min(hosts),
        disk_free=min(disks),
        ranks=collectives.world_size(),
        ranks_on_node=max(on_nodes),
        device_total=None if totals[0] is None else min(totals),
        device_name=names[0] if len(set(names)) == 1 else "",
    )


def machine_now() -> Machine:
    """Measure this rank's machine without communication; the launcher says how many ranks it has."""
    free, total = memory_size()
    own = free, host_free(), disk_free(Path()), collectives.world_size(), collectives.ranks_here()
    return Machine(*own, device_total=total, device_name=device_name())


def memory_line(rank: int, root: Path = Path("/")) -> str:
    """The memory of this process and of its machine, in one line.

    Args:
        root: the folder of proc/ and sys/.
    """
    gpu = "no accelerator"
    if on_accelerator():
        gpu = f"GPU {local_rank()}: other processes hold all its memory"
        with suppress(RuntimeError):  # CUDA itself does not start
            held, (free, total) = held_memory(), memory_size()
            numbers = {"allocated": held.allocated, "reserved": held.reserved, "in all": total, "free": free}
            listed = ", ".join(f"{n / GIB:.2f} GiB {word}" for word, n in numbers.items())
            gpu = f"GPU {local_rank()}: {listed}"
    own, system = read_sizes(root / "proc/self/status"), read_sizes(root / "proc/meminfo")
    limits = [f"{n / GIB:.2f} GiB ({where})" for n, where in memory_limits(root) if n < system["MemTotal"]]
    parts = [
        gpu,
        f"this process: {own['VmRSS'] / GIB:.2f} GiB of CPU memory, "
        f"{own['VmSize'] / GIB:.2f} GiB of address space",
        f"limited to {', '.join(limits)}" if limits else "no limit",
        f"machine: {system['MemTotal'] / GIB:.2f} GiB, {host_free(root) / GIB:.2f} GiB free for it",
    ]
    return f"rank {rank}: {'; '.join(parts)}"


class Demand(NamedTuple):
    """Demand for one kind of memory, in bytes."""

    where: str
    need: int
    free: int
    share: float
    """Share of `free` to be kept in reserve."""

    @property
    def reserve(self) -> float:
        return reserve(self.free, self.share)

    @property
    def over(self) -> float:
        """Missing bytes; below 0 those left next to the reserve."""
        return self.need - (self.free - self.reserve)

    @property
    def is_met(self) -> bool:
        return self.over <= 0

    def __str__(self) -> str:
        return f"{amount(self.need)} {self.where}"

    @property
    def supply(self) -> str:
        return f"{amount(self.free)} {self.where} ({amount(self.reserve)} of them kept in reserve)"


def demands(moments: Iterable[Bytes], machine: Machine) -> list[Demand]:
    """Demands for each kind of memory of `machine`, of each the most at one moment.

    Args:
        moments: what each rank takes at the moments of a run, as `phase_peak.moments` lists them.
    """
    moments, here, demanded = list(moments), machine.ranks_on_node, []

    def most(of: Callable[[Bytes], int]) -> int:
        return max(map(of, moments), default=0)

    if machine.device_free is not None:
        on_gpu = most(lambda rank: rank.device + rank.transient)
        demanded.append(Demand("on each GPU", on_gpu, machine.device_free, PIECES))
    swapped = here * most(lambda rank: rank.disk)
    disk = swapped and swapped + machine.files
    return [
        *demanded,
        Demand("of CPU memory", most(lambda rank: here * rank.host + rank.node), machine.host_free, SYSTEM),
        Demand("of disk", disk, machine.disk_free, SYSTEM),
    ]
