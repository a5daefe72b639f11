"""A student's blocks in training: activation checkpointing, and the hidden states for feature matching."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from wandistiller.engine.engine_config import CheckpointPolicy
from wandistiller.network.block_source import SOURCE
from wandistiller.network.heads import PROJECTIONS


class Blocks:
    """Runs the blocks of one network while gradients are on, instead of diffusers' plain loop."""

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, tuple[str, ...]],
        policy: CheckpointPolicy | None,
        *,
        copies: bool = False,
    ):
        """Take over `model`'s blocks.

        Args:
            model: the outputs of the blocks with a projection in its `feature_projections` are kept.
            parts: modules of a block that are recomputed, as in `NetworkConfig.parts`.
            copies: checkpoints keep copies of their inputs, as `empties_inputs` demands. Text, time and rope
                are inputs of every block, which are else kept once.
        """
        self.features: dict[int, Tensor] = {}
        self._number = {block: i for i, block in enumerate(model.blocks)}
        self._projections = dict(getattr(model, PROJECTIONS, nn.ModuleDict()).items())
        chosen = {model.blocks[i] for i in policy.recomputed(len(model.blocks))} if policy else set()
        names = parts[policy.checkpoint] if policy else ()
        self._whole, self._copies = chosen if not names else set(), copies
        self._recomputes, self._source = True, getattr(model, SOURCE, None)
        for part in (block.get_submodule(name) for block in chosen for name in names):
            part.forward = partial(self._run_part, part, part.forward)
        for block in (set(model.blocks) - self._whole) if self._source else ():
            block.forward = partial(self._run_stored, block, block.forward)
        if self._whole or self._projections or self._source:
            model.enable_gradient_checkpointing(self._run)

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Keep all activations within: reentrant checkpoints refuse gradients of inputs alone.

        But for blocks whose weights come from a source: torch's other checkpoints recompute these.
        """
        self._recomputes = False
        try:
            yield
        finally:
            self._recomputes = True

    def _run_part(self, part: nn.Module, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return _checkpointed(part, run, self._copies, *inputs) if self._recomputes else run(*inputs)

    def _run_stored(self, block: nn.Module, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Compute a block that is not recomputed, whose weights are not there until its backward pass."""
        if not (self._recomputes and torch.is_grad_enabled()):
            return run(*inputs)
        with self._source.saved(self._number[block], block):
            return run(*inputs)

    def _run(self, block: nn.Module, h_BSD: Tensor, *others: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        run, number = block, self._number[block]
        if self._recomputes and block in self._whole:
            run = partial(_checkpointed, block, block, self._copies)
        elif self._source and not self._recomputes:
            run = partial(checkpoint, block, use_reentrant=False)
        if self._source and number == len(self._number) - 1:
            self._source.turn()
        h_BSD = run(h_BSD, *others)
        if self._source and h_BSD.grad_fn and not self._projections:
            # autograd takes what has the highest number first: of several networks the same block in turn;
            # where projections read blocks too, another order of its sums would round otherwise
            h_BSD.grad_fn._set_sequence_nr(number)
        if project := self._projections.get(str(number)):
            # inside the engine's forward, so that ZeRO-3 gathers the projection
            self.features[number] = project(h_BSD)
        return h_BSD


def _checkpointed(module: nn.Module, run: Callable[..., Tensor], copies: bool, *inputs: Any) -> Tensor:
    """Call `run`, the forward of `module`, under DeepSpeed's checkpointing, which follows the JSON's section.

    Its inputs must be tensors (deepspeed 0.19.8), so they are passed flat.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    leaves, form = tree_flatten(inputs)
    tensors = [leaf.clone() if copies else leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not any(t.requires_grad for t in tensors) and any(p.requires_grad for p in module.parameters()):
        # all before is frozen; without one such input reentrant checkpoints give no gradient
        tensors[0] = tensors[0].detach().requires_grad_()
    # the closure must not hold the tensors
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensor_numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def recompute(*tensors: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # torch.compile has a variant for inputs that need gradients
            tensors = tuple(t.detach() for t in tensors)
        all_leaves = dict(enumerate(rest)) | dict(zip(tensor_numbers, tensors, strict=True))
        return run(*tree_unflatten([*all_leaves.values()], form))

    del leaves, inputs
    return deepspeed.checkpointing.checkpoint(recompute, *tensors)
