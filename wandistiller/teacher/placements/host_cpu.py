"""A teacher in CPU memory that all ranks of a node share, computed there."""

from typing import ClassVar

from torch import nn

from wandistiller.distributed import collectives
from wandistiller.engine.zero_memory import Bytes, Topology
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.loading import load_shared
from wandistiller.teacher.placements.base import Placement


class HostCpu(Placement):
    """One copy in each node's CPU memory."""

    on_cpu: ClassVar[bool] = True

    def load(self, folder: Folder, expert: Expert, reader: WeightReader) -> nn.Module:
        config, peers = folder.configs[expert], collectives.node_peers()
        return load_shared(reader, config, self.engine.dtype, peers, self.weights)

    def memory(self, config: NetworkConfig, sharers: int) -> Bytes:
        return Bytes(node=super().memory(config, sharers).device)

    def is_candidate(self, topology: Topology) -> bool:
        return topology.accelerator or topology.ranks_on_node > 1  # else it is a replica
