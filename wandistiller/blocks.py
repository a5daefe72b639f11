"""How a student's blocks run in training: which are computed again in backward, whose outputs feature matching sees."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import deepspeed
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from wandistiller import wan
from wandistiller.recompute import MODULES, Recompute

PROJECTIONS = "feature_projections"
"""Name of the student's trained projections, by block number; they are no part of the exported student."""


def add_projections(model: WanTransformer3DModel, blocks: Iterable[int], width: int) -> None:
    """Give `model` a projection of each of these blocks' outputs into a teacher of `width`, the same on every rank.

    A linear map without bias that starts as the truncated identity; nothing to learn where the widths agree.
    """
    own = wan.width(model.config)
    made: dict[str, nn.Module] = {str(k): nn.Identity() if own == width else nn.Linear(own, width, bias=False) for k in blocks}
    for p in nn.ModuleDict(made).parameters():
        nn.init.eye_(p)
    setattr(model, PROJECTIONS, nn.ModuleDict(made))


class Blocks:
    """Runs the blocks of one network while gradients are on, in place of diffusers' plain loop."""

    def __init__(self, model: WanTransformer3DModel, again: Recompute | None):
        """Take over `model`'s blocks.

        Args:
            model: may have an `nn.ModuleDict` called `feature_projections`, block number -> module; those blocks' outputs
                are kept.
            again: what is computed again in backward; None keeps all activations.
        """
        self.features: dict[int, Tensor] = {}
        self._number = {block: i for i, block in enumerate(model.blocks)}
        self._projections = dict(getattr(model, PROJECTIONS, nn.ModuleDict()).items())
        chosen = set(list(model.blocks)[:: again.checkpoint_every]) if again else set()
        parts = MODULES[again.checkpoint] if again else ()
        for part in (block.get_submodule(name) for block in chosen for name in parts):
            part.forward = partial(_computed_again, part, part.forward)
        self._whole = chosen if not parts else set()
        if self._whole or self._projections:
            model.enable_gradient_checkpointing(self._run)

    def _run(self, block: nn.Module, h_BSD: Tensor, *others: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        run = partial(_computed_again, block, block) if block in self._whole else block
        h_BSD, number = run(h_BSD, *others), self._number[block]
        if project := self._projections.get(str(number)):
            self.features[number] = project(h_BSD)  # inside the engine's forward, so that ZeRO-3 gathers the projection
        return h_BSD


def _computed_again(module: nn.Module, run: Callable[..., Tensor], *given: Any) -> Tensor:
    """Call `run`, the forward of `module`, under DeepSpeed's checkpointing, which honours the JSON's section.

    It wants tensors only, and its partitioning and offloading empty those that it is given (deepspeed 0.19.8): so they
    are passed flat, and as copies.
    """
    if not torch.is_grad_enabled():
        return run(*given)
    leaves, form = tree_flatten(given)
    tensors = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(t.requires_grad for t in tensors) and any(p.requires_grad for p in module.parameters()):
        tensors[0].requires_grad_()  # all before is frozen; without one such input reentrant checkpoints give no gradient
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]  # the closure must not hold the tensors
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def again(*tensors: Tensor) -> Tensor:
        full = list(rest)
        for i, tensor in zip(places, tensors, strict=True):
            full[i] = tensor
        return run(*tree_unflatten(full, form))

    del leaves, given
    return deepspeed.checkpointing.checkpoint(again, *tensors)


def configure(ds: dict[str, Any]) -> None:
    """Tell DeepSpeed's checkpointing, which is one for the process, what the JSON says."""
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=ds)
