"""How a student's blocks run in training: which are computed again in backward, whose outputs feature matching sees."""

from typing import Any

import deepspeed
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

PROJECTIONS = "feature_projections"
"""Name of the student's trained projections, by block number; they are no part of the exported student."""


class Blocks:
    """Runs the blocks of one network while gradients are on, in place of diffusers' plain loop."""

    def __init__(self, model: WanTransformer3DModel, ds: dict[str, Any]):
        """Take over `model`'s blocks.

        Args:
            model: may have an `nn.ModuleDict` called `feature_projections`, block number -> module; those blocks' outputs
                are kept.
            ds: the student's JSON; with `activation_checkpointing` each block is computed again in backward.
        """
        self.features: dict[int, Tensor] = {}
        self._number = {block: i for i, block in enumerate(model.blocks)}
        self._projections = dict(getattr(model, PROJECTIONS, nn.ModuleDict()).items())
        self._again = "activation_checkpointing" in ds
        if self._again or self._projections:
            model.enable_gradient_checkpointing(self._run)

    def _run(self, block: nn.Module, h_BSD: Tensor, text_BLD: Tensor, time_B6D: Tensor,
             rope: tuple[Tensor, Tensor]) -> Tensor:  # fmt: skip
        run = _checkpointed if self._again else nn.Module.__call__
        h_BSD, number = run(block, h_BSD, text_BLD, time_B6D, rope), self._number[block]
        if project := self._projections.get(str(number)):
            # inside the engine's forward, so that ZeRO-3 gathers the projection; a copy, since partitioned or offloaded
            # checkpoints empty the tensors they are given (deepspeed 0.19.8), and the next block is given this one
            self.features[number] = project(h_BSD.clone())
        return h_BSD


def _checkpointed(
    block: nn.Module, h_BSD: Tensor, text_BLD: Tensor, time_B6D: Tensor, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """Run a block under DeepSpeed's checkpointing, which honours the JSON's section.

    Its partitioning and offloading empty the tensors they are given (deepspeed 0.19.8), so those that all blocks
    share are passed as copies, and the rope tuple flat.
    """
    return deepspeed.checkpointing.checkpoint(
        lambda h, e, t, cos, sin: block(h, e, t, (cos, sin)),
        h_BSD, text_BLD.clone(), time_B6D.clone(), rope[0].clone(), rope[1].clone(),
    )  # fmt: skip
