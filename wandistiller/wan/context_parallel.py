"""A Wan transformer whose sequences several ranks share: each computes a part of the tokens.

diffusers' own `enable_parallelism` (0.42.1) is for inference: its backward pass computes attention once more,
and the gradient of its gathered outputs lacks the factor that averaging over the ranks takes away.
"""

from typing import Any

from diffusers import WanTransformer3DModel
from torch import nn

from wandistiller.distributed.sequence_parallel import SHARING, Ranks, Sharing
from wandistiller.wan.kernels import SelfAttention


def share_sequences(model: WanTransformer3DModel, ranks: Ranks) -> WanTransformer3DModel:
    """Let `model` take whole inputs and give whole outputs, but compute this rank's tokens alone. Collective.

    Hidden states between its blocks are then those of this rank's tokens.
    """
    if ranks.degree == 1:
        return model
    now = Sharing(ranks)

    def own_timesteps(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take this rank's part of the timestep of each patch, which the pipeline of Wan2.2 5B gives."""
        timestep = kwargs.get("timestep")
        if timestep is not None and timestep.ndim == 2:
            kwargs = kwargs | {"timestep": now.ranks.part(timestep)}
        return args, kwargs

    model.register_forward_pre_hook(own_timesteps, with_kwargs=True)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: (now.ranks.part(inputs[0]), *inputs[1:]))
    model.proj_out.register_forward_hook(lambda *args: now.ranks.whole(args[-1]))
    for block in model.blocks:
        block.attn1.set_processor(SelfAttention(now))
    setattr(model, SHARING, now)
    return model
