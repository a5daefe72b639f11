"""Floating-point operations of a network, counted by torch on the meta device, which takes no memory.

Matrix products and attention are counted; a multiply-add is two operations.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from wandistiller.engine.engine_config import CheckpointPolicy
from wandistiller.network.activation_memory import META, Latent
from wandistiller.network.config import NetworkConfig
from wandistiller.network.names import in_block
from wandistiller.utils.memoize import once_for_each


class Flops(NamedTuple):
    """Operations of a forward pass over one sample."""

    products: int
    """Of states and weights."""
    attention: int
    parts: dict[str, int]
    """Operations of all blocks by checkpointed part, named as in `parts`; `blocks` are whole blocks."""

    @property
    def forward(self) -> int:
        return self.products + self.attention

    def backward(self, trained: float) -> float:
        """Return the operations of a backward pass: gradients of all states, and of some weights.

        Args:
            trained: share of the weights that learn; of adapters those of adapters in all weights.
        """
        return (1 + trained) * self.products + 2 * self.attention

    def recomputed(self, policy: CheckpointPolicy | None, layers: int) -> float:
        """Return the share of the operations of so many blocks that a backward pass computes again."""
        share = len(policy.recomputed(layers)) / layers if policy else 0.0
        return share and self.parts[policy.checkpoint] / self.parts["blocks"] * share


@once_for_each
def count_flops(config: NetworkConfig, latent: Latent) -> Flops:
    """Count the operations of a forward pass over one sample; one block is traced for all."""
    model = config.replaced(num_layers=1).meta(META).requires_grad_(False)
    state = config.blank_state(latent, device=META)
    # attention as matrix products, as torch 2.13 does not count the CPU's own kernel of it
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        config.velocity(model, state)
    by_module: Counter[str] = Counter()
    for module, counts in counter.get_flop_counts().items():
        by_module[module.partition(".")[2]] += sum(counts.values())
    layers, block = config.num_layers, by_module[in_block(0)]
    parts = {
        part: layers * (sum(by_module[in_block(0, name)] for name in names) or block)
        for part, names in config.parts.items()
    }
    attention = layers * counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    return Flops(counter.get_total_flops() + (layers - 1) * block - attention, attention, parts)
