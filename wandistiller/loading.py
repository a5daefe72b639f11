"""Loads one Wan transformer from safetensors to where it will live; no rank holds more than it keeps and one tensor."""

import mmap
import os
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller import distributed
from wandistiller.wan import parameter_dtype, put, skeleton
from wandistiller.weights import WeightReader

ALIGNED = 64  # bytes; what torch's own allocator gives, on which the choice of a kernel may depend


def load_whole(
    reader: WeightReader, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> WanTransformer3DModel:
    """The whole model on this rank's `device`, as diffusers' from_pretrained makes it."""
    model = skeleton(config)
    for name, wanted in _parameters(model, dtype):
        value = torch.empty_like(wanted, device=device)
        reader.read(name, value)
        put(model, name, value)
    model.rope.to(device)
    return model


def load_sharded(
    reader: WeightReader, config: dict[str, Any], dtype: torch.dtype, ds: dict[str, Any], device: torch.device
) -> WanTransformer3DModel:
    """Load for ZeRO-3: each rank reads the part of each tensor that it keeps, where `ds` says. Collective.

    Mixed dtypes as in `load_whole`, so the result is bit-equal to diffusers' own.
    """
    model = skeleton(config)
    home, in_memory = _Partition(ds, dtype), _Partition(_without_nvme(ds), dtype)
    pinned = PinnedParts(model, ds, dtype)
    for name, wanted in _parameters(model, dtype):
        value = torch.empty(wanted.shape, dtype=wanted.dtype)  # untouched pages take no memory
        part = -(-value.numel() // distributed.world_size())
        first = 0 if home.needs_whole else part * distributed.rank()
        reader.read(name, value.view(-1)[first:] if home.needs_whole else value.view(-1)[first : first + part], first)
        put(model, name, value)
        # a swapper has one dtype and would store a float32 parameter in bf16 (deepspeed 0.19.8); few are kept in float32
        p = model.get_parameter(name)
        (home if wanted.dtype == dtype else in_memory).take(p)
        pinned.take(p)
    model.rope.to(device)
    return model


def load_shared(
    reader: WeightReader, config: dict[str, Any], dtype: torch.dtype, peers: list[int]
) -> WanTransformer3DModel:
    """The whole model in CPU memory that `peers`, all ranks of this node, share; each reads a part of each tensor. Collective."""
    model = skeleton(config)
    parameters = list(_parameters(model, dtype))
    arena = Arena(sum(_aligned(p) for _, p in parameters), peers)
    for name, wanted in parameters:
        value = arena.take(wanted)
        part = -(-value.numel() // len(peers))
        first = part * peers.index(distributed.rank())
        reader.read(name, value.view(-1)[first : first + part], first)
        put(model, name, value)
    distributed.barrier()  # all parts are there
    return model


def _parameters(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Names, and meta tensors of the dtype that diffusers would give them."""
    for name, p in list(model.named_parameters()):
        yield name, p.to(parameter_dtype(name, dtype))


class _Partition(deepspeed.zero.Init):
    """zero.Init without its broadcast from rank 0: every rank has read its own bytes already (deepspeed 0.19.8)."""

    def __init__(self, ds: dict[str, Any], dtype: torch.dtype):
        # its argument `dtype` is passed over where the accelerator has no fp16 (deepspeed 0.19.8), so the sections say it
        sections = {"bf16": {"enabled": dtype is torch.bfloat16}, "fp16": {"enabled": dtype is torch.float16}}
        super().__init__(config_dict_or_path=_pageable(ds) | sections)
        self.needs_whole = self.zero_param_process_group is not None  # hpZ keeps a second part for its node

    def take(self, parameter: nn.Parameter) -> None:
        if not is_zero_param(parameter):
            self._convert_to_deepspeed_param(parameter)
            parameter.partition()


class PinnedParts:
    """Moves host parts into one page-locked block of their exact size.

    DeepSpeed pins part by part, and torch's pinned allocator rounds each up to a power of two (torch 2.13): 1.8 times the
    memory for Wan's feed-forward layers.
    """

    def __init__(self, model: nn.Module, ds: dict[str, Any], dtype: torch.dtype):
        section = ds.get("zero_optimization", {}).get("offload_param", {})
        self._wanted = torch.cuda.is_available() and section.get("device") == "cpu" and section.get("pin_memory", False)
        if self._wanted:
            world = distributed.world_size()
            parts = (p.new_empty(-(-p.numel() // world)) for _, p in _parameters(model, dtype))
            self._arena = Arena(sum(_aligned(p) for p in parts))
            self._arena.pin()

    def take(self, parameter: nn.Parameter) -> None:
        part = parameter.ds_tensor
        if self._wanted and part.device.type == "cpu":
            part.data = self._arena.take(part).copy_(part)


class Arena:
    """One block of memory cut into tensors; this process's own, or shared by some ranks of a node.

    It lives as long as its tensors, and leaves nothing behind when a process is killed: there is no file.
    """

    def __init__(self, nbytes: int, peers: list[int] | None = None):
        if peers is None:
            self._memory = mmap.mmap(-1, nbytes)
        else:
            self._memory = _shared_memory(nbytes, peers)
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """The next free piece as a tensor of the same shape and dtype; its content is zero."""
        start, self._used = self._used, self._used + _aligned(like)
        return torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)

    def pin(self) -> None:
        """Lock the pages for fast copies to the accelerator."""
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, len(self._memory), 0)
        torch.cuda.check_error(int(error))


def _shared_memory(nbytes: int, peers: list[int]) -> mmap.mmap:
    """The same anonymous memory on every rank of `peers`, made by the first. Collective."""
    first = distributed.rank() == peers[0]
    fd = os.memfd_create("wandistiller") if first else -1
    if first:
        os.ftruncate(fd, nbytes)
    of_first = distributed.gather_objects((os.getpid(), fd))[peers[0]]
    if not first:
        fd = os.open(f"/proc/{of_first[0]}/fd/{of_first[1]}", os.O_RDWR)
    memory = mmap.mmap(fd, nbytes)
    distributed.barrier()  # the others have opened it
    os.close(fd)
    return memory


def _aligned(tensor: Tensor) -> int:
    """Bytes that a tensor takes in an arena."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED


def _without_nvme(ds: dict[str, Any]) -> dict[str, Any]:
    zero = ds["zero_optimization"]
    if zero.get("offload_param", {}).get("device") != "nvme":
        return ds
    return ds | {"zero_optimization": zero | {"offload_param": {"device": "cpu"}}}


def _pageable(ds: dict[str, Any]) -> dict[str, Any]:
    """Without pinning part by part; `PinnedParts` pins all at once."""
    zero = ds["zero_optimization"]
    if zero.get("offload_param", {}).get("device") != "cpu":
        return ds
    return ds | {"zero_optimization": zero | {"offload_param": zero["offload_param"] | {"pin_memory": False}}}
