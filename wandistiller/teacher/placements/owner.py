"""A teacher on one rank of a node, which computes for all ranks there."""

from torch import nn

from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.network.folder import Folder
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.loading import load_whole
from wandistiller.teacher.placements.base import OnOneRank


class Owner(OnOneRank):
    """The whole teacher on the accelerator of rank `owner_rank` of each node."""

    def load(self, folder: Folder, expert: Expert, reader: WeightReader) -> nn.Module:
        config, device = folder.configs[expert], collectives.device()
        return load_whole(reader, config, self.engine.dtype, device, self.weights, alone=True)
