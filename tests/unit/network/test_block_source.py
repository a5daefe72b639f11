"""The order in which blocks are asked for: up in forward passes, down where backward recomputes them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wandistiller.network.block_source import BlockSource

LAYERS = 5


class Recorded(BlockSource):
    """Notes which block is entered and which is to follow."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.entered: list[tuple[int, int | None]] = []

    def enter(self, number: int, ahead: list[int]) -> None:
        self.entered.append((number, next(iter(ahead), None)))


class Network(nn.Module):
    """Blocks one after the other, each under a checkpoint, as in training."""

    def __init__(self, source: BlockSource):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
        self._source = source
        source.serve(self)

    def forward(self, x: torch.Tensor, *, learns: bool) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if learns and number == LAYERS - 1:
                self._source.turn()
            x = checkpoint(block, x, use_reentrant=False) if learns else block(x)
        return x


def test_after_the_last_block_of_a_forward_pass_the_first_follows_for_the_next_call() -> None:
    source = Recorded()
    Network(source)(torch.ones(1, 2), learns=False)
    assert source.entered == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


def test_backward_asks_for_the_block_below_and_forward_does_not_ask_for_the_first_before_it() -> None:
    source = Recorded()
    y = Network(source)(torch.ones(1, 2), learns=True)
    assert source.entered == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 3)]
    source.entered.clear()
    y.sum().backward()
    assert source.entered == [(4, 3), (3, 2), (2, 1), (1, 0), (0, None)]


def test_a_pass_between_forward_and_backward_does_not_turn_the_direction() -> None:
    source = Recorded()
    network = Network(source)
    y = network(torch.ones(1, 2), learns=True)
    network(torch.ones(1, 2), learns=False)
    source.entered.clear()
    y.sum().backward()
    network(torch.ones(1, 2), learns=False)
    assert source.entered[:5] == [(4, 3), (3, 2), (2, 1), (1, 0), (0, None)]
    assert source.entered[5:] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


def test_networks_that_share_the_weights_follow_one_direction() -> None:
    source = Recorded()
    one, other = Network(source), Network(source)
    x = torch.ones(1, 2)
    for first, second in zip(one.blocks, other.blocks, strict=True):  # as calls in one sweep
        x = second(first(x))
    assert [number for number, _ in source.entered] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [ahead for _, ahead in source.entered[::2]] == [1, 2, 3, 4, 0]
