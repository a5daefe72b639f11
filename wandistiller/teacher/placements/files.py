"""A teacher that stays in its own files; its blocks are read from there just before each is called."""

from typing import ClassVar

from torch import nn

from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.engine.zero_memory import Bytes, Topology
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.disk_blocks import Slots, read_block, read_by_block
from wandistiller.teacher.placements.streamed import Streamed

AHEAD = 2
"""Blocks that are read while another computes."""


class Files(Streamed):
    """No copy in CPU memory or on disk: each rank holds the block that computes, and those read ahead.

    Several micro-steps go through the blocks together, so that the weights arrive once for all of them.
    """

    reads_at_calls: ClassVar[bool] = True

    def holds_quantized(self) -> bool:
        return False  # each block would be quantised anew at each call

    def problems(self, world: int) -> list[str]:
        problems = super().problems(world)
        if self.compile:
            text = "Blocks that are read from files change their place in memory; leave it out."
            problems.append(self.engine.problem(f"{BLOCK}.compile", True, text))
        return problems

    def load_all(self, folder: Folder, readers: dict[Expert, WeightReader]) -> dict[Expert, nn.Module]:
        """Read every weight once, a node's ranks a part each, for the readers' `faults` and `nonzero`."""
        device, peers = collectives.device(), collectives.node_peers()
        slots, models = Slots(device, AHEAD), {}
        for expert, reader in readers.items():
            config = folder.configs[expert]
            models[expert] = model = read_by_block(reader, config, self.engine.dtype, device, slots)
            mine = range(peers.index(collectives.rank()), config.num_layers, len(peers))
            progress = Progress(f"blocks of {reader.folder.name}", len(mine))
            for number in mine:
                read_block(reader, number, dict(model.blocks[0].named_parameters()))
                progress.advance()
        return models

    def memory(self, config: NetworkConfig, sharers: int) -> Bytes:
        blocks, others = self.split(config)
        return Bytes(device=others, transient=(1 + AHEAD) * max(blocks.values()))

    def fetched(self, config: NetworkConfig, topology: Topology) -> int:
        return sum(self.split(config)[0].values())

    def is_on_disk(self) -> bool:
        return True

    def is_candidate(self, topology: Topology) -> bool:
        return True
