"""Weights under ZeRO-3 that are fetched block by block, and not while the GPU is far behind the host."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from wandistiller.distributed.device import kind, on_accelerator
from wandistiller.engine.engine_config import EngineConfig

AHEAD = 1
"""Blocks that the device may have yet to finish when the host fetches the weights of the next."""


class FetchPace:
    """Lets the host wait before a block until the device has finished the block before the last.

    Fetched weights are allocated on a side stream and freed with `record_stream`, so their memory comes back
    once the device has used them, while DeepSpeed (0.19.8) counts them as free once the host has passed.
    A host that is faster than the device would fetch as many blocks as there are launches in CUDA's queue:
    15 of a 14B, 10 GB (DeepSpeed issues 7217 and 7670). Backward passes are bounded where blocks are
    recomputed in them.
    """

    def __init__(self, blocks: Iterable[nn.Module], event: Callable[[], torch.Event]):
        """Hook `blocks`, before the hooks that fetch their weights."""
        self._event, self._ends = event, deque[torch.Event]()
        for block in blocks:
            block.register_forward_pre_hook(self._wait, prepend=True)
            block.register_forward_hook(self._mark)

    def _wait(self, *_: Any) -> None:
        while len(self._ends) > AHEAD:
            self._ends.popleft().synchronize()

    def _mark(self, *_: Any) -> None:
        end = self._event()
        end.record()
        self._ends.append(end)


def fetching_blocks(engine: EngineConfig, block_class: str) -> EngineConfig:
    """Return the JSON with the weights of a block fetched at once under ZeRO-3, in half the time of the host.

    On NVMe it would need a buffer for each matrix of a block, the largest's size. And only for a network
    that is not trained: before a backward pass DeepSpeed (0.19.8) releases the frozen
    weights of a block whose inputs need no gradient, and it reduces a block's gradients twice where they
    come from two outputs.
    """
    if engine.stage < 3 or engine.weights_on == "nvme":
        return engine
    blocks = {"leaf_module": {"classes": [block_class]}}
    return engine.replaced(zero_optimization=blocks | engine.section("zero_optimization"))


def pace_fetches(modules: Iterable[nn.Module]) -> None:
    """Bound the memory of the fetched weights of a ZeRO-3 model in its engine, if it computes on a GPU.

    Args:
        modules: the model's, in the order of their calls; each fetches weights.
    """
    if on_accelerator():
        FetchPace(modules, torch.get_device_module(kind()).Event)
