"""Fills one Wan transformer in its place from a `WeightReader`; a rank holds its part, and one tensor."""

import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import Tensor, nn

from wandistiller.distributed import collectives
from wandistiller.distributed.device import lock_pages, unlock_pages
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.shutdown import Stopped, stopping
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.network.block_source import BUFFERS, BlockStream, Buffers
from wandistiller.network.config import NetworkConfig
from wandistiller.network.names import block_of, is_in_block, set_parameter
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.quantized import WHOLE, Weights, parameters_of, stored_weights_of

T = TypeVar("T")
LOOK_EVERY = 8
"""Tensors that are loaded between two looks for a request to stop, of 1.1 GiB in Wan 14B at most."""
ALIGNED = 64  # bytes; what torch's own allocator gives, on which the choice of a kernel may depend


def load_whole(
    reader: WeightReader,
    config: NetworkConfig,
    dtype: torch.dtype,
    device: torch.device,
    weights: Weights = None,
    *,
    alone: bool = False,
) -> nn.Module:
    """Load the whole model to this rank's `device`, bit-equal to diffusers' from_pretrained.

    Args:
        weights: format of the blocks' linear layers, which are then quantised one by one.
        alone: the other ranks do not load it; without it collective.
    """
    model = config.meta(device)
    for name, weight in one_by_one(stored_weights_of(model, dtype, weights), reader, alone=alone):
        pieces = [torch.empty_like(piece, device=device) for piece in weight.pieces]
        weight.read(reader, name, pieces, WHOLE, device)
        set_parameter(model, name, weight.assembled(pieces))
    return model


def load_sharded(
    reader: WeightReader,
    config: NetworkConfig,
    dtype: torch.dtype,
    engine: EngineConfig,
    device: torch.device,
    peers: list[int] | None = None,
) -> nn.Module:
    """Load for ZeRO-3 as `engine` says: each rank reads the part of each tensor that it keeps. Collective.

    Args:
        peers: the ranks that a tensor is cut among, which are those of this node; all, if it is left out.

    Mixed dtypes as in `load_whole`, so the result is bit-equal to diffusers' own.
    """
    model, home = config.meta(device), InitWithoutBroadcast(engine, dtype, peers)
    # all of a rank's weights in CPU memory as one: DeepSpeed pins part by part, and torch's pinned allocator
    # rounds each up to a power of two (torch 2.13), 1.8 times the memory for Wan's feed-forward layers
    parts = (p.new_empty(-(-p.numel() // home.dp_world_size)) for _, p in parameters_of(model, dtype))
    arena = Arena(sum(map(_aligned, parts)))  # unused pages take no memory
    if engine.weights_on == "cpu" and engine.offload("param").get("pin_memory", False):
        arena.lock()
    for name, meta in one_by_one(dict(parameters_of(model, dtype)), reader):
        if home.swaps(meta):
            # memory of its own is given back to the system at once, and untouched pages take none
            value, elements = Arena(_aligned(meta)).take(meta), home.part(meta)
            reader.read(name, value.view(-1)[elements], elements.start)
            set_parameter(model, name, value)
            home.split(model.get_parameter(name))
        else:
            # a shape that takes no memory, on the device that DeepSpeed 0.19.8 gathers to
            hollow = torch.empty(1, dtype=meta.dtype, device=home.local_device)
            set_parameter(model, name, hollow.expand(meta.shape))
            part = home.keep(model.get_parameter(name), arena)
            reader.read(name, part, home.part(meta).start)
    return model


def load_shared(
    reader: WeightReader, config: NetworkConfig, dtype: torch.dtype, peers: list[int], weights: Weights = None
) -> nn.Module:
    """Load to CPU memory that `peers`, this node's ranks, share; each reads its part. Collective."""
    model, share = config.meta(), (peers.index(collectives.rank()), len(peers))
    parameters = stored_weights_of(model, dtype, weights, len(peers))
    arena = Arena(sum(_aligned(piece) for weight in parameters.values() for piece in weight.pieces), peers)
    for name, weight in one_by_one(parameters, reader):
        pieces = [arena.take(piece) for piece in weight.pieces]
        weight.read(reader, name, pieces, share, torch.device("cpu"))
        set_parameter(model, name, weight.assembled(pieces))
    collectives.barrier()  # all parts are there
    return model


def load_streamed(
    reader: WeightReader,
    config: NetworkConfig,
    dtype: torch.dtype,
    device: torch.device,
    peers: list[int],
    buffers: Buffers,
    weights: Weights = None,
) -> nn.Module:
    """Load the blocks to CPU memory that `peers` share, page-locked for a GPU, the rest to `device`.

    The blocks' parameters are views of `buffers`, filled by a `BlockStream`. Collective.

    Args:
        weights: format of the blocks' linear layers, which are quantised on `device`.
    """
    model, share = config.meta(device), (peers.index(collectives.rank()), len(peers))
    parameters = stored_weights_of(model, dtype, weights, len(peers))
    offsets_of, sizes = {}, Counter()
    for name, weight in parameters.items():
        for piece in weight.pieces if is_in_block(name) else ():
            offsets_of.setdefault(name, []).append(sizes[block_of(name)])
            sizes[block_of(name)] += _aligned(piece)
    arena = Arena(sizes.total(), peers)
    stored = {b: arena.take(torch.empty(n, dtype=torch.uint8, device="meta")) for b, n in sizes.items()}
    buffer_of = {b: buffers.tensors[number % BUFFERS] for number, b in enumerate(sizes)}
    for name, weight in one_by_one(parameters, reader):
        if name in offsets_of:
            block, offsets = block_of(name), offsets_of[name]
            weight.read(reader, name, _pieces(stored[block], offsets, weight.pieces), share, device)
            pieces = _pieces(buffer_of[block], offsets, weight.pieces)
        else:
            pieces = [torch.empty_like(piece, device=device) for piece in weight.pieces]
            weight.read(reader, name, pieces, WHOLE, device)
        set_parameter(model, name, weight.assembled(pieces))
    collectives.barrier()
    arena.lock()  # once the threads that read have got the pages, which the driver does one by one
    BlockStream(list(stored.values()), buffers).serve(model)
    return model


def _pieces(flat: Tensor, offsets: list[int], likes: list[Tensor]) -> list[Tensor]:
    """The parts of `flat`, bytes, that begin at `offsets`, as tensors of these shapes and dtypes."""
    pairs = zip(offsets, likes, strict=True)
    return [flat[offset : offset + t.nbytes].view(t.dtype).view(t.shape) for offset, t in pairs]


def one_by_one(
    parameters: dict[str, T], reader: WeightReader, *, alone: bool = False
) -> Iterator[tuple[str, T]]:
    """Yield items of `parameters`, with a log of the progress: a large teacher takes minutes.

    Args:
        alone: only this rank loads, and looks for a request to stop; else all do so together.

    Raises:
        Stopped: between two items, on all ranks that load.
    """
    progress = Progress(f"loading the teacher, {reader.folder.name}", len(parameters), "weight")
    for number, item in enumerate(parameters.items()):
        if alone and stopping.reason:
            raise Stopped("while the teacher was loaded")
        if not alone and number % LOOK_EVERY == 0:
            collectives.raise_if_stop_requested("while the teacher was loaded")
        yield item
        progress.advance()


class InitWithoutBroadcast(deepspeed.zero.Init):
    """zero.Init without its broadcast from rank 0: every rank reads its own bytes (deepspeed 0.19.8)."""

    def __init__(self, engine: EngineConfig, dtype: torch.dtype, peers: list[int] | None):
        zero = engine.section("zero_optimization")
        if engine.weights_on == "cpu":  # its memory is pinned in `load_sharded`
            zero = zero | {"offload_param": zero["offload_param"] | {"pin_memory": False}}
        # without fp16 on the accelerator its argument `dtype` is ignored, the sections not (deepspeed 0.19.8)
        sections = {"bf16": {"enabled": dtype is torch.bfloat16}, "fp16": {"enabled": dtype is torch.float16}}
        group = collectives.group(peers) if peers else None
        engine = engine.replaced(zero_optimization=zero, **sections)
        super().__init__(config_dict_or_path=engine.for_deepspeed, data_parallel_group=group)

    def part(self, meta: Tensor) -> slice:
        """This rank's elements; the last may lie past the end."""
        size = -(-meta.numel() // self.dp_world_size)
        return slice(size * self.rank, size * (self.rank + 1))

    def swaps(self, meta: Tensor) -> bool:
        """Return whether the part goes to NVMe, which DeepSpeed must cut itself.

        A swapper has one dtype and would store float32 parameters in bf16 (0.19.8): these stay in memory.
        """
        if self.param_swapper is None or meta.dtype != self.dtype:
            return False
        return self.param_swapper.swappable_tensor(numel=-(-meta.numel() // self.dp_world_size))

    def split(self, parameter: nn.Parameter) -> None:
        self._convert_to_deepspeed_param(parameter)
        parameter.partition()
        # as in `load_sharded`
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.local_device)

    def keep(self, parameter: nn.Parameter, arena: "Arena") -> Tensor:
        """Make a parameter of which only this rank's part ever exists; return that, to be filled."""
        self._convert_to_deepspeed_param(parameter)
        numel = -(-parameter.numel() // self.dp_world_size)
        like = torch.empty(numel, dtype=parameter.dtype, device="meta")
        away = self.remote_device in ("cpu", "nvme") and not parameter.ds_persist
        in_host = away or self.local_device.type == "cpu"
        part = arena.take(like) if in_host else torch.empty_like(like, device=self.local_device)
        part.ds_numel, part.status, part.final_location = len(part), PartitionedParamStatus.AVAILABLE, None
        parameter.ds_tensor, parameter.ds_numel_aligned = part, len(part) * self.dp_world_size
        parameter.partition()  # finds that it has been cut
        return part


class Arena:
    """One block of memory cut into tensors; this process's own, or shared by some ranks of a node.

    It lives as long as its tensors, and leaves nothing behind when a process is killed: there is no file.
    """

    def __init__(self, nbytes: int, peers: list[int] | None = None):
        if peers and collectives.world_size() > 1:
            self._memory = _shared_memory(nbytes, peers)
        else:  # of large pages, which Linux makes in a third of the time, but for no memory that is shared
            self._memory = _Memory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def take(self, like: Tensor) -> Tensor:
        """The next free piece as a tensor of the same shape and dtype; its content is zero."""
        start, self._used = self._used, self._used + _aligned(like)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=start)
        return flat.view(like.shape)

    def lock(self) -> None:
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        if lock_pages(address, len(self._memory)):
            self._memory.locked = address


class _Memory(mmap.mmap):
    """Memory that unlocks its pages when freed, or the driver would keep them for the next owner."""

    locked: int | None = None

    def __del__(self) -> None:
        if self.locked is not None:
            unlock_pages(self.locked)


def _shared_memory(nbytes: int, peers: list[int]) -> _Memory:
    """The same anonymous memory on every rank of `peers`, made by the first. Collective."""
    first, fd = collectives.rank() == peers[0], None
    if first:
        fd = os.memfd_create("wandistiller")
        os.ftruncate(fd, nbytes)
    first_pid, first_fd = collectives.gather_objects((os.getpid(), fd))[peers[0]]
    if not first:
        fd = os.open(f"/proc/{first_pid}/fd/{first_fd}", os.O_RDWR)
    memory = _Memory(fd, nbytes)
    collectives.barrier()  # the others have opened it
    os.close(fd)
    return memory


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
