"""Wan's VAE as loaded here: a call for which memory is not free as a whole runs in tiles."""

import logging
from functools import cached_property
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from wandistiller.distributed import collectives
from wandistiller.distributed.device import held_memory, memory_size
from wandistiller.network.folder import Need
from wandistiller.utils.system_memory import PIECES, amount, host_free, reserve, room_of_a_rank
from wandistiller.wan.fake_tensor_memory import coding, tile

log = logging.getLogger("wandistiller")


class FittingVae(AutoencoderKLWan):
    """AutoencoderKLWan that codes in diffusers' overlapping, blended tiles what does not fit whole.

    It chooses at the first call of each size, by the memory that is free then, and says so. A whole call is
    exact, and tiles differ from it near their seams; a latent cache that was made in tiles therefore has
    slightly other numbers than one of a machine with more memory.
    """

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        """Encode pixels_BCFHW in [-1, 1], whole or in tiles."""
        self._set_tiles("encode", x, self.config.patch_size or 1)
        return super().encode(x, return_dict)

    def decode(self, z: Tensor, return_dict: bool = True) -> Any:
        """Decode latents z_BCFHW, whole or in tiles."""
        self._set_tiles("decode", z, 1)
        return super().decode(z, return_dict)

    @cached_property
    def chosen(self) -> dict[tuple[str, torch.Size], bool]:
        """True for calls in tiles, by kind of call and shape of its input."""
        return {}

    def _set_tiles(self, call: str, x_BCFHW: Tensor, patch: int) -> None:
        """Switch tiles on or off for a call, as chosen at the first of its size.

        Args:
            patch: pixels along a side that diffusers' tiles count as one.
        """
        key = call, x_BCFHW.shape
        if key not in self.chosen:
            # by accelerate's hook the weights come to the device in the call
            on_their_way = sum(p.nbytes for p in self.parameters() if p.device.type != x_BCFHW.device.type)
            room = room_on(x_BCFHW.device) - on_their_way
            shape, gpu = tuple(x_BCFHW.shape), x_BCFHW.device.type != "cpu"
            need, self.chosen[key] = fitting(call, self.config, shape, room, accelerator=gpu)
            if self.chosen[key]:
                whole = coding(call, self.config, shape, accelerator=gpu)
                message = "the VAE %ss %s in tiles: a whole call takes %s, %s are free; tiles take %s"
                sizes = map(amount, (whole.work, room, need.work))
                log.info(message, call, "x".join(map(str, shape)), *sizes)
        if not self.chosen[key]:
            self.disable_tiling()
            return
        pixels = 1 if call == "encode" else self.spatial_compression_ratio
        tall, wide = (tile(n * pixels) for n in x_BCFHW.shape[-2:])
        sides, strides = zip(tall, wide, strict=True)
        self.enable_tiling(*(n // patch for n in (*sides, *strides)))


def fitting(
    call: str, config: dict[str, Any], shape: tuple[int, ...], room: float, *, accelerator: bool
) -> tuple[Need, bool]:
    """Return the memory of a call of the VAE that has `room` bytes, and True if it runs in tiles.

    Tiles are for a call that does not fit whole, and takes less in tiles. Call and shape are as in `coding`.

    Args:
        room: bytes that it may take next to the weights.
    """
    whole = coding(call, config, shape, accelerator=accelerator)
    if whole.work <= room:
        return whole, False
    tiled = coding(call, config, shape, accelerator=accelerator, tiles=True)
    return (tiled, True) if tiled.work < whole.work else (whole, False)


def room_on(device: torch.device) -> int:
    """Return the bytes that this rank may take on `device` now, a reserve left out."""
    if device.type == "cpu":
        return room_of_a_rank(host_free(), collectives.ranks_here())
    held = held_memory()
    free = memory_size()[0] + held.reserved - held.allocated
    return int(free - reserve(free, PIECES))
