"""A source of the weights of blocks that are there only while they compute, forward and backward."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

from torch import nn

SOURCE = "block_source"
"""Attribute of a network whose blocks' weights come from a source."""


class BlockSource(ABC):
    """Gives blocks their weights when they are called, those of all networks that share the weights.

    It follows the direction of travel: up in a forward pass, down where backward recomputes each block.
    """

    def __init__(self, layers: int):
        self._layers, self._last, self._turns = layers, -1, False

    @abstractmethod
    def enter(self, number: int, ahead: list[int]) -> None:
        """Have the weights of a block there, and begin to fetch those `ahead`, the next one first."""

    def serve(self, network: nn.Module) -> None:
        for number, block in enumerate(network.blocks):
            block.register_forward_pre_hook(partial(self._enter, number))
        setattr(network, SOURCE, self)

    def turn(self) -> None:
        """Announce that a backward pass follows the last block, which is entered next."""
        self._turns = True

    def _enter(self, number: int, *_: Any) -> None:
        turns, self._turns = self._turns, False
        falls = number == self._last - 1 or number == self._last == self._layers - 1
        self._last = number
        if turns or falls:
            ahead = range(number - 1, -1, -1)
        else:  # after the last the first, for the next call
            ahead = ((number + i) % self._layers for i in range(1, self._layers))
        self.enter(number, list(ahead))
