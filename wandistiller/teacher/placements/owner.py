"""A teacher on one rank of a node, which computes for all ranks there."""

from torch import nn

from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.teacher.loading import load_whole
from wandistiller.teacher.placements.base import OnOneRank
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.weight_reader import WeightReader


class Owner(OnOneRank):
    """The whole teacher on the accelerator of rank `owner_rank` of each node."""

    def load(self, folder: WanFolder, expert: Expert, reader: WeightReader) -> nn.Module:
        config, device = folder.configs[expert], collectives.device()
        return load_whole(reader, config, self.engine.dtype, device, self.weights, alone=True)
