"""Networks whose blocks are read from their files just before they are called; memory holds a few."""

from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.distributed.device import worker
from wandistiller.network.block_source import BlockSource
from wandistiller.network.config import NetworkConfig
from wandistiller.network.names import in_block, set_parameter, split_name
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.quantized import parameters_of
from wandistiller.utils.errors import ConfigError

Weights = dict[str, Tensor]
"""Of a block, by the names of its parameters."""


class Slots:
    """Memory for the block that is called and those read ahead, of any of several networks of one shape."""

    def __init__(self, device: torch.device, ahead: int):
        """`ahead`: blocks read while others compute."""
        self.device, self.ahead = device, ahead
        self.current: tuple[int, int] | None = None
        """The network and block that was called last."""
        self._free: list[Weights] | None = None
        self._held: dict[tuple[int, int], tuple[Weights, Future]] = {}
        # a thread begins on the first GPU, where going back to it would start CUDA, for half a GiB
        self._thread = worker("teacher_files")
        self._streams = torch.get_device_module(device)
        self._copies = self._streams.Stream(device)

    def make_for(self, like: Weights) -> Weights:
        """Allocate the slots, once, for blocks with weights `like` these; return one of them."""
        if self._free is None:
            self._free = [
                {leaf: torch.empty_like(t, device=self.device) for leaf, t in like.items()}
                for _ in range(1 + self.ahead)
            ]
        return self._free[-1]

    def weights(self, network: int, numbers: list[int], reader: WeightReader) -> Weights:
        """Return the weights of the first of some blocks once they are read, and let the others be read.

        Args:
            numbers: of the block that is called, and of those that follow.

        Raises:
            ConfigError: they could not be read, or are not finite.
        """
        wanted = [(network, number) for number in numbers[: 1 + self.ahead]]
        for key in self._held.keys() - set(wanted):
            self._held[key][1].exception()  # it may still be read
            self._free.append(self._held.pop(key)[0])
        used = self._streams.current_stream(self.device).record_event()
        for key in wanted:
            if key not in self._held:
                slot = self._free.pop()
                self._held[key] = slot, self._thread.submit(self._read, reader, key[1], slot, used)
        slot, arrived = self._held[wanted[0]]
        arrived.result()
        if reader.faults:
            raise ConfigError(*reader.faults)
        return slot

    def _read(self, reader: WeightReader, number: int, slot: Weights, used: Any) -> None:
        """Fill a slot, after what the device was given before, which used the slot."""
        arrived = self._streams.Event()
        with self._streams.stream(self._copies):
            self._copies.wait_event(used)
            read_block(reader, number, slot)
            arrived.record()
        arrived.synchronize()


def read_block(reader: WeightReader, number: int, slot: Weights) -> None:
    for leaf, value in slot.items():
        reader.read(in_block(number, leaf), value)


def read_by_block(
    reader: WeightReader, config: NetworkConfig, dtype: torch.dtype, device: torch.device, slots: Slots
) -> nn.Module:
    """Make the model on `device`, bit-equal to diffusers' from_pretrained, its blocks' weights in `slots`.

    A sweep, of calls that go through the blocks together, reads each block once.
    """
    model, of_block = config.meta(device), {}
    for name, meta in parameters_of(model, dtype):
        number, leaf = split_name(name)
        if number is not None:
            of_block[leaf] = meta  # all blocks have the same
        else:
            value = torch.empty_like(meta, device=device)
            reader.read(name, value)
            set_parameter(model, name, value)
    empty = slots.make_for(of_block)
    for block in model.blocks:
        for leaf, value in empty.items():
            # `data` counts its changes by itself: autograd must not take another block's arrival for a change
            set_parameter(block, leaf, value.data)
    _DiskBlocks(model, reader, slots).serve(model)
    return model


class _DiskBlocks(BlockSource):
    """Reads the weights of the block that is called, unless it was called last."""

    def __init__(self, model: nn.Module, reader: WeightReader, slots: Slots):
        super().__init__(len(model.blocks))
        self._reader, self._slots = reader, slots
        self._parameters = [dict(block.named_parameters()) for block in model.blocks]

    def enter(self, number: int, ahead: list[int]) -> None:
        key = id(self), number
        if self._slots.current == key:  # another batch of a sweep, or its recomputation
            return
        self._slots.current = key
        weights = self._slots.weights(id(self), [number, *ahead], self._reader)
        for leaf, value in weights.items():
            self._parameters[number][leaf].data = value
