"""A teacher in CPU memory that a node's ranks share; its blocks come to each accelerator one by one."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field
from torch import nn

from wandistiller.distributed import collectives
from wandistiller.engine.zero_memory import Bytes, Topology, one_at_a_time, round_up
from wandistiller.experts import Expert
from wandistiller.network.block_source import BUFFERS, Buffers
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.names import block_of, is_in_block
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.loading import ALIGNED, load_streamed
from wandistiller.teacher.placements.base import Placement

WAITING = 2**30
"""Bytes of hidden states between two blocks, for 33 guided images of 480x832 with a 14B. A video computes for
longer than the weights take to arrive, so it needs no others beside it."""


@dataclass(frozen=True, kw_only=True)
class Streamed(Placement):
    """One copy of the blocks in each node's CPU memory; two of them at a time on each accelerator.

    Each rank copies all of them for itself, so ranks need not be at the same block. Several micro-steps go
    through the blocks together, so that the weights arrive once for all of them.
    """

    sweeps: ClassVar[bool] = True

    sweep_micro_steps: Annotated[int, Field(ge=1)] | None = None
    """Micro-steps that go through the blocks together; left out: all of an update, within WAITING bytes."""

    def load(self, folder: Folder, expert: Expert, reader: WeightReader) -> nn.Module:
        return self.load_all(folder, {expert: reader})[expert]

    def load_all(self, folder: Folder, readers: dict[Expert, WeightReader]) -> dict[Expert, nn.Module]:
        peers, device = collectives.node_peers(), collectives.device()
        largest = max(max(self.split(folder.configs[expert])[0].values()) for expert in readers)
        buffers = Buffers(largest, device)
        options = self.engine.dtype, device, peers, buffers, self.weights
        return {e: load_streamed(reader, folder.configs[e], *options) for e, reader in readers.items()}

    def can_be_shared(self) -> bool:
        return True

    def sweep(self, micro_steps: int, nbytes: int) -> int:
        return min(self.sweep_micro_steps or max(1, WAITING // nbytes), micro_steps)

    def can_work_ahead(self) -> bool:
        return True

    def memory(self, config: NetworkConfig, sharers: int) -> Bytes:
        blocks, others = self.split(config)
        return Bytes(device=others, transient=BUFFERS * max(blocks.values()), node=sum(blocks.values()))

    def in_all(self, experts: list[Bytes]) -> Bytes:
        both = one_at_a_time(experts)  # the buffers serve each, and stay
        return replace(both, device=both.device + both.transient, transient=0)

    def fetched(self, config: NetworkConfig, topology: Topology) -> int:
        return sum(self.split(config)[0].values()) if topology.accelerator else 0

    def is_candidate(self, topology: Topology) -> bool:
        return topology.accelerator

    def split(self, config: NetworkConfig) -> tuple[Counter[str], int]:
        """Bytes of each block as they lie in a buffer, and of all other parameters."""
        blocks: Counter[str] = Counter()
        others = 0
        for size in self.parameter_sizes(config):
            if is_in_block(size.name):
                blocks[block_of(size.name)] += round_up(size.part(1), ALIGNED)
            else:
                others += size.part(1)
        return blocks, others
