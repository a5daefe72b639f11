"""Memory of one rank's share of a network under ZeRO, by the arithmetic of deepspeed 0.19.8."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.workarounds import AHEAD


class Topology(NamedTuple):
    """The ranks of a run."""

    ranks: int
    ranks_on_node: int
    """On the node with the most."""
    accelerator: bool
    """True if each rank has one; else all of them compute on CPUs."""

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_on_node)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one rank, in bytes."""

    device: int = 0
    """Kept on its accelerator, or in CPU memory where there is none."""
    transient: int = 0
    """There too, but only during a call or an optimizer step; an upper bound."""
    host: int = 0
    """Its own CPU memory."""
    node: int = 0
    """CPU memory that a node's ranks share, or that one of them has for all; the whole of it."""
    disk: int = 0

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(getattr(self, kind) + getattr(other, kind) for kind in Bytes.__slots__))


def one_at_a_time(engines: list[Bytes]) -> Bytes:
    """Return the sum of the kept memory of several engines, with the transient memory of one at a time."""
    return replace(sum(engines, Bytes()), transient=max(e.transient for e in engines))


class ParameterSize(NamedTuple):
    """One parameter: its name, number of elements, and bytes of each."""

    name: str
    numel: int
    item: int

    def part(self, ranks: int) -> int:
        """Bytes of one rank's partition under ZeRO-3, padding included."""
        return -(-self.numel // ranks) * self.item


def module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def partition_bytes(sizes: list[ParameterSize], ranks: int) -> int:
    """Bytes of one rank's partitions; of the whole network for one rank."""
    return sum(s.part(ranks) for s in sizes)


def gathered_bytes(
    sizes: list[ParameterSize],
    engine: EngineConfig,
    ranks: int,
    reused: int = 0,
    *,
    unit_of: Callable[[str], str] = module_of,
) -> tuple[int, int]:
    """Bytes of whole parameters on the device under ZeRO-3: persistent ones, and at most those in transit.

    Fetching goes on below `stage3_max_live_parameters`, so one module, or block that is fetched as one, may
    come on top. What several ranks gather at once lies there twice, until it is cut into parameters.

    Args:
        reused: elements that are kept between forward and backward pass.
        unit_of: what is fetched as one with a parameter: its module, or its block, see `fetching_blocks`.
    """
    if ranks == 1 and engine.weights_on == "none":
        return 0, 0  # the partition is the whole, used where it lies
    zero, modules = engine.zero, Counter()
    for s in sizes:
        modules[unit_of(s.name)] += s.part(1) if s.numel > zero.param_persistence_threshold else 0
    item, largest = min(s.item for s in sizes), max(modules.values())
    available = item * max(reused, zero.max_live_parameters) + largest
    in_flight = item * zero.prefetch_bucket_size + largest if ranks > 1 else 0
    transient = min(modules.total(), available) + min(modules.total(), in_flight)
    return partition_bytes(sizes, ranks=1) - modules.total(), transient


def behind_bytes(sizes: list[ParameterSize], engine: EngineConfig, block_of: Callable[[str], str]) -> int:
    """Bytes of the blocks that an accelerator has yet to finish when the host fetches the next.

    See `FetchPace`. Their memory comes back once it has; on a CPU there are none.
    """
    small, blocks = engine.zero.param_persistence_threshold, Counter()
    for s in sizes:
        blocks[block_of(s.name)] += s.part(1) if s.numel > small else 0
    return AHEAD * max(blocks.values())


def swapped_bytes(sizes: list[ParameterSize], engine: EngineConfig, ranks: int) -> Bytes:
    """Partitions on NVMe and their buffers; small ones, and those of another dtype, stay in CPU memory."""
    offload, aio, item = engine.offload("param"), engine.section("aio"), engine.dtype.itemsize
    step = 1024 * aio.get("intra_op_parallelism", 1)  # reads and writes are multiples of it
    parts = [s.part(ranks) for s in sizes if s.item == item]
    buffer = round_up(max(*parts, item * offload.get("buffer_size", 0)), step)  # as in nvme.to_own_folder
    on_disk = [part for part in parts if part >= max(2**20, aio.get("block_size", 2**20))]
    host = partition_bytes(sizes, ranks) - sum(on_disk) + offload.get("buffer_count", 5) * buffer
    return Bytes(host=host, disk=sum(round_up(part, step) for part in on_disk))


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below `n`."""
    return -(-n // multiple) * multiple
