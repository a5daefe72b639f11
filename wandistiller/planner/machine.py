"""Free memory and disk of a machine, and what the phases of a run need of each."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
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


def this_machine(swap_path: Path) -> Machine:
    """Measure this machine now. Collective; if there are other ranks, after `distributed.init`."""
    sizes = *memory_size(), host_free(), disk_free(swap_path), len(collectives.node_peers()), device_name()
    frees, totals, hosts, disks, on_nodes, names = zip(*collectives.gather_objects(sizes), strict=True)
    return Machine(
        device_free=None if frees[0] is None else min(frees),
        host_free=min(hosts),
        disk_free=min(disks),
        ranks=collectives.world_size(),
        ranks_on_node=max(on_nodes),
        device_total=None if totals[0] is None else min(totals),
        device_name=names[0] if len(set(names)) == 1 else "",
    )


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
    process, system = read_sizes(root / "proc/self/status"), read_sizes(root / "proc/meminfo")
    limits = [f"{n / GIB:.2f} GiB ({where})" for n, where in memory_limits(root) if n < system["MemTotal"]]
    parts = [
        gpu,
        f"this process: {process['VmRSS'] / GIB:.2f} GiB of CPU memory, "
        f"{process['VmSize'] / GIB:.2f} GiB of address space",
        f"limited to {', '.join(limits)}" if limits else "no limit",
        f"machine: {system['MemTotal'] / GIB:.2f} GiB, {host_free(root) / GIB:.2f} GiB free for it",
    ]
    return f"rank {rank}: {'; '.join(parts)}"


Parts = dict[str, Bytes]
"""Memory of a rank by its use, in words."""


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """Memory of one phase of a run."""

    lasting: Parts
    """Held during the whole phase."""
    alternatives: dict[str, Parts] = field(default_factory=dict)
    """Held one after the other, never together."""

    def peak(self) -> Bytes:
        """The most of each kind of memory; `transient` is part of `device`."""
        return total(self.lasting) + _most(total(parts) for parts in self.alternatives.values())

    def at(self, alternative: str) -> Bytes:
        return total(self.lasting) + total(self.alternatives.get(alternative, {}))

    def parts(self, kind: Callable[[Bytes], int]) -> dict[str, int]:
        """Bytes of one kind of memory at its peak, by use: what lasts, and the largest alternative."""
        largest = max(self.alternatives.values(), key=lambda parts: kind(total(parts)), default={})
        uses = self.lasting | largest
        return {use: kind(self.lasting.get(use, Bytes()) + largest.get(use, Bytes())) for use in uses}


def moments(phases: dict[str, PhasePeak]) -> list[Bytes]:
    """Memory at each moment of the phases: during each alternative, beside what lasts throughout."""
    return [p.at(alternative) for p in phases.values() for alternative in p.alternatives or ("",)]


def total(parts: Parts) -> Bytes:
    return sum(parts.values(), Bytes())


def most(phases: dict[str, PhasePeak]) -> Bytes:
    """The most of each kind of memory in any phase."""
    return _most(phase.peak() for phase in phases.values())


def _most(several: Iterable[Bytes]) -> Bytes:
    all_of = [(b.device + b.transient, 0, b.host, b.node, b.disk) for b in several]
    return Bytes(*map(max, zip(*all_of, strict=True)))


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
        return f"{amount(self.free)} {self.where} ({amount(self.reserve)} of it kept in reserve)"


def demands(taken: list[Bytes], machine: Machine) -> list[Demand]:
    """Demands for each kind of memory of `machine`, of each the most at one moment.

    Args:
        taken: of each rank at the moments of a run, as `moments` lists them.
    """
    ranks, demanded = machine.ranks_on_node, []
    if machine.device_free is not None:
        on_gpu = max((b.device + b.transient for b in taken), default=0)
        demanded.append(Demand("on each GPU", on_gpu, machine.device_free, PIECES))
    in_host = max((ranks * b.host + b.node for b in taken), default=0)
    swapped = ranks * max((b.disk for b in taken), default=0)
    return [
        *demanded,
        Demand("of CPU memory", in_host, machine.host_free, SYSTEM),
        Demand("of disk", swapped and swapped + machine.files, machine.disk_free, SYSTEM),
    ]
