"""Floating-point operations of Wan's transformer, counted by torch on the meta device, which takes no memory.

Matrix products and attention are counted; a multiply-add is two operations.
"""

from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wandistiller.engine.activation_checkpointing import CheckpointPolicy
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.activation_memory import Latent
from wandistiller.wan.structure import PARTS, in_block
from wandistiller.wan.transformer import blank_state, meta_transformer, velocity
from wandistiller.wan.transformer_config import TransformerConfig


class _Pass(NamedTuple):
    """Operations on one sample."""

    forward: int
    parts: dict[str, int]
    """Operations of the forward pass by checkpointed part, named as in `PARTS`; `blocks` is the whole
    block."""
    backward: int


@once_for_each
def forward_flops(config: TransformerConfig, latent: Latent) -> int:
    """Count the operations of a forward pass over one sample, without gradients."""
    model = meta_transformer(config.replaced(num_layers=1)).requires_grad_(False)
    one = _pass(model, config, latent, model.blocks[0], reached=False)
    return one.forward + (config.num_layers - 1) * one.parts["blocks"]


def step_flops(
    model: nn.Module, config: TransformerConfig, latent: Latent, policy: CheckpointPolicy | None
) -> int:
    """Count the operations of a student's forward and backward pass over one sample.

    One block of each kind is traced: kinds differ in which weights are trained, and in whether gradients go
    back through them. The blocks of `model` are taken out while it is traced.

    Args:
        model: on the meta device, with adapters and `requires_grad` as it is trained.
        config: the transformer's; that of `model` does not know whether its first frame is given.
    """
    blocks, reached = model.blocks, _trains(model.patch_embedding) or _trains(model.condition_embedder)
    without = _pass(model, config, latent, _Through(), reached or _trains(blocks))
    total, known = without.forward + without.backward, {}
    for number, block in enumerate(blocks):
        kind = (reached, *(name for name, p in block.named_parameters() if p.requires_grad))
        if kind not in known:
            known[kind] = _pass(model, config, latent, block, reached)
        one, reached = known[kind], reached or _trains(block)
        total += one.forward - without.forward
        if reached:
            total += one.backward - without.backward
        if policy and reached and number % policy.checkpoint_every == 0:
            total += one.parts[policy.checkpoint]
    model.blocks = blocks
    return total


class _Through(nn.Module):
    """A block without matrix products, through which gradients reach all inputs of a block."""

    def forward(self, h_BSD: Tensor, text_BLD: Tensor, time_BND: Tensor, _: Any) -> Tensor:
        return h_BSD + text_BLD.sum() + time_BND.sum()


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _pass(
    model: nn.Module, config: TransformerConfig, latent: Latent, block: nn.Module, reached: bool
) -> _Pass:
    """Trace `model` with this block alone.

    Args:
        reached: True if gradients go back to before the block.
    """
    model.blocks = nn.ModuleList([block])
    model.to("meta")  # the rope tables, which `meta_transformer` makes on the CPU

    def enter(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if reached and not inputs[0].requires_grad:  # in the whole network an earlier weight is trained
            inputs[0].requires_grad_()

    hook = block.register_forward_pre_hook(enter)
    state = blank_state(config, latent, device="meta")
    # attention as matrix products, as torch 2.13 does not count the CPU's own kernel of it
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        v_BCFHW = velocity(model, state)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        if v_BCFHW.requires_grad:
            v_BCFHW.sum().backward()
    hook.remove()
    model.zero_grad()
    by_module = Counter()
    for module, counts in forward.get_flop_counts().items():
        by_module[module.partition(".")[2]] += sum(counts.values())
    parts = {
        part: sum(by_module[in_block(0, name)] for name in names) or by_module[in_block(0)]
        for part, names in PARTS.items()
    }
    return _Pass(forward.get_total_flops(), parts, backward.get_total_flops())
