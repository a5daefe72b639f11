"""Called on ranks by test_heads.py: means of heads' outputs by ranks that share samples."""

from torch import Tensor

from wandistiller.batch import State
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import Ranks
from wandistiller.network.heads import of_made_patches


def shared_mean(logit_BS1: Tensor, batch: State) -> Tensor:
    """Return the mean_B of the outputs of a head whose samples all ranks share."""
    ranks = Ranks.in_groups_of(collectives.world_size())
    of_rank = of_made_patches({0: ranks.part(logit_BS1)}, batch, ranks)[0]
    return ranks.mean(of_rank.flatten(1).mean(1))
