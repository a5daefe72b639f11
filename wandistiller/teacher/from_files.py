"""A network whose blocks are read from its files, each when it is called: one is in memory at a time."""

from functools import partial
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.teacher.forms import parameters_of
from wandistiller.wan.transformer import meta_transformer, set_parameter
from wandistiller.wan.weight_reader import WeightReader


def read_by_block(
    reader: WeightReader, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> WanTransformer3DModel:
    """Make the model on `device`, bit-equal to diffusers' from_pretrained; its blocks' weights share memory.

    A sweep, of calls that go through the blocks together, reads each block once.
    """
    model, of_blocks = meta_transformer(config), {}
    for name, meta in parameters_of(model, dtype):
        first, _, rest = name.partition(".")
        if first != "blocks":
            value = torch.empty_like(meta, device=device)
            reader.read(name, value)
        else:
            leaf = rest.partition(".")[2]  # all blocks have the same
            value = of_blocks.setdefault(leaf, torch.empty_like(meta, device=device))
        set_parameter(model, name, value)
    model.rope.to(device)
    _FromFiles(model.blocks, reader, of_blocks)
    return model


class _FromFiles:
    """Reads the block that is called, unless it was read last."""

    def __init__(self, blocks: nn.ModuleList, reader: WeightReader, tensors: dict[str, Tensor]):
        self._reader, self._tensors = reader, tensors
        self._held: int | None = None
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, number))

    def _enter(self, number: int, *_: Any) -> None:
        if self._held != number:
            for leaf, value in self._tensors.items():
                self._reader.read(f"blocks.{number}.{leaf}", value)
            self._held = number
