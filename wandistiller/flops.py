"""The floating-point operations of Wan's transformer; a multiplication with the addition to its sum counts as two."""

import math
import re
from typing import Any, NamedTuple

from wandistiller.memory import Network, once_for_each
from wandistiller.recompute import Recompute
from wandistiller.wan import TEXT_TOKENS, width


class Flops(NamedTuple):
    """Of a forward pass over one sample."""

    attention: int
    """Of one block, self and cross."""
    feed_forward: int
    """Of one block."""
    layers: int
    ends: int
    """Of the embedders and the output, together."""
    scores: int
    """Of `attention`: products of two activations."""
    tokens: int

    @property
    def forward(self) -> int:
        return self.layers * (self.attention + self.feed_forward) + self.ends

    def step(self, again: Recompute | None, network: Network) -> int:
        """Forward and backward pass of a student; backward computes a product for each factor of forward's that needs a gradient:
        weights that are trained, and what was made of such.

        Args:
            again: what backward computes a second time.
            network: of this shape, with its adapters and projections.
        """
        taken, first = _with_weights(network, self.tokens)
        blocks = [k for k in range(self.layers) if k >= first]
        taken += (self.layers + 2 * len(blocks)) * self.scores
        if again is None:
            return taken
        part = {"blocks": self.attention + self.feed_forward, "attention": self.attention,
                "feed_forward": self.feed_forward}[again.checkpoint]  # fmt: skip
        return taken + sum(k % again.checkpoint_every == 0 for k in blocks) * part


@once_for_each
def _with_weights(network: Network, tokens: int) -> tuple[int, float]:
    """Operations of a step's products with weights, and the place of the first that is trained."""
    every = network.trained | network.frozen
    first = min(map(_place, network.trained))
    behind = {name: n for name, n in every.items() if _place(name) >= first and (first < 0 or not _of_text(name))}
    return sum(_products(weights, tokens) for weights in (every, network.trained, behind)), first


def _place(name: str) -> float:
    """Of a weight in the order of a forward pass: its block's number, below 0 for the embedders, over all for the output."""
    if number := re.match(r"blocks\.(\d+)\.", name):
        return int(number[1])
    return -1 if name.startswith(("patch_embedding", "condition_embedder")) else math.inf


def _of_text(name: str) -> bool:
    """Whether the weight multiplies text tokens."""
    return any(part in name for part in ("text_embedder", "attn2.to_k", "attn2.to_v"))


def _products(weights: dict[str, int], tokens: int) -> int:
    """With each of these weights, by name, once; tables, biases and norms multiply no matrix."""
    return sum(2 * n * (TEXT_TOKENS if _of_text(name) else 1 if "time_" in name else tokens)
               for name, n in weights.items() if name.endswith(".weight") and "norm" not in name)  # fmt: skip


def flops(config: dict[str, Any], tokens: int) -> Flops:
    """Products of matrices alone, which are all but all of it.

    With D = width, F = ffn_dim, T tokens and L = 512 text tokens a block takes

        self-attention    8 T D² (q, k, v, out) + 4 T² D
        cross-attention   4 T D² (q, out) + 4 L D² (k, v) + 4 T L D
        feed-forward      4 T D F

    Args:
        config: of the transformer.
        tokens: of the sample, as `WanFolder.tokens` has it.
    """
    t, text, d, f = tokens, TEXT_TOKENS, width(config), config["ffn_dim"]
    patch = math.prod(config["patch_size"])
    ends = 2 * t * d * patch * (config["in_channels"] + config["out_channels"])
    ends += 2 * text * d * (config["text_dim"] + d) + 2 * d * (config["freq_dim"] + d + 6 * d)
    attention = 8 * t * d * d + 4 * t * t * d + 4 * (t + text) * d * d + 4 * t * text * d
    return Flops(attention=attention, feed_forward=4 * t * d * f, layers=config["num_layers"], ends=ends,
                 scores=4 * t * (t + text) * d, tokens=t)  # fmt: skip
