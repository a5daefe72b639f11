"""The floating-point operations of Wan's transformer; a multiplication with the addition to its sum counts as two."""

from math import prod
from typing import Any, NamedTuple

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

    @property
    def forward(self) -> int:
        return self.layers * (self.attention + self.feed_forward) + self.ends

    def step(self, again: Recompute | None) -> int:
        """Forward and backward pass of a student; backward computes two products for each of forward's.

        Args:
            again: what backward computes a second time.
        """
        if again is None:
            return 3 * self.forward
        part = {"blocks": self.attention + self.feed_forward, "attention": self.attention,
                "feed_forward": self.feed_forward}[again.checkpoint]  # fmt: skip
        return 3 * self.forward + -(-self.layers // again.checkpoint_every) * part


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
    patch = prod(config["patch_size"])
    ends = 2 * t * d * patch * (config["in_channels"] + config["out_channels"])
    ends += 2 * text * d * (config["text_dim"] + d) + 2 * d * (config["freq_dim"] + d + 6 * d)
    attention = 8 * t * d * d + 4 * t * t * d + 4 * (t + text) * d * d + 4 * t * text * d
    return Flops(attention=attention, feed_forward=4 * t * d * f, layers=config["num_layers"], ends=ends)
