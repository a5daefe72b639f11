"""Called on ranks with simulated GPUs by test_simulator.py: small programs, right ones and wrong ones."""

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shipped import placement
from small_wan import VAE21
from states import state
from torch import Tensor, nn

from wandistiller.distributed import collectives
from wandistiller.network import block_source
from wandistiller.teacher.base import Guidance
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.loading import Arena
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.components import decoded, encoded, vae_of
from wandistiller.wan.loaded_components import Encoder, offload_kwargs
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.vae import FittingVae, fitting

GPU = "cuda:0"
MANY = 100_000
"""Elements: more than the smallest piece of memory that is given out."""


def arithmetic(device: str) -> list[Tensor]:
    """A network's output and gradients, random numbers, indexing and scans, in CPU memory."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)).to(device)
    x = torch.randn(4, 6, 8).to(device)
    query, key = network(x).view(4, 6, 2, 4).transpose(1, 2).chunk(2, -1)
    attention = nn.functional.scaled_dot_product_attention(query, key, query * 2)
    loss = nn.functional.rms_norm(attention, (2,)).square().mean()
    loss.backward()
    drawn = torch.randn(5, device=device, generator=torch.Generator(device).manual_seed(3))
    values = [
        loss,
        *(p.grad for p in network.parameters()),
        drawn,
        x[x > 0],
        x.cumsum(1),
        x.to(torch.bfloat16),
    ]
    return [value.detach().cpu() for value in values]


def late_copy(wait: bool) -> bool:
    """Whether a kernel finds what another stream copies, when its stream waits for that one or does not."""
    source = torch.ones(MANY, pin_memory=True)
    target, copies = torch.zeros(MANY, device=GPU), torch.cuda.Stream()
    copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        target.copy_(source, non_blocking=True)
    if wait:
        torch.cuda.current_stream().wait_stream(copies)
    return bool((target + 1 == 2).all())


def early_read() -> bool:
    """Whether the host finds what is copied to page-locked memory, without waiting for it."""
    target = torch.zeros(MANY, pin_memory=True)
    target.copy_(torch.ones(MANY, device=GPU), non_blocking=True)
    is_there = bool((target == 1).all())
    torch.cuda.synchronize()
    assert bool((target == 1).all())
    return is_there


def freed_too_early(record: bool) -> None:
    """Use memory on a second stream and free it; its next owner is on the first."""
    other = torch.cuda.Stream()
    first = torch.zeros(MANY, device=GPU)
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        first.add_(1)
    if record:
        first.record_stream(other)
    del first
    torch.ones(MANY, device=GPU)


def unregister_too_early(wait: bool) -> None:
    """Free page-locked memory, as a teacher that is no longer needed, while a copy of it may be under way."""
    arena = Arena(4 * MANY)
    arena.lock()
    source, target = arena.take(torch.empty(MANY, device="meta")), torch.empty(MANY, device=GPU)
    target.copy_(source, non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(source.data_ptr())


def free_teacher_in_use(folder: Path) -> int:
    """Free a streamed teacher that has asked for a block of a next call; bytes left on the GPU."""
    from on_ranks.placements import NULL_LD, SCALES, outputs

    guidance = Guidance(NULL_LD.to(GPU), SCALES)
    wan = open_wan(str(folder))
    teacher = build_teacher(wan, placement("streamed"), guidance)
    outputs(teacher, wan.config.replaced(num_layers=1), torch.device(GPU))
    del teacher, guidance
    gc.collect()
    return torch.cuda.memory_allocated()


def gpus_of_reads(folder: Path) -> set[int]:
    """Call a teacher whose blocks are read from its files; the GPUs whose streams were made current."""
    made_current, set_stream = set(), torch.cuda.set_stream

    def noted(stream: torch.cuda.Stream) -> None:
        made_current.add(stream.device.index)
        set_stream(stream)

    torch.cuda.set_stream = noted
    wan, device = open_wan(str(folder)), collectives.device()
    teacher = build_teacher(wan, placement("files", "float32"))
    x_BCFHW, text_BLD = torch.randn(1, 16, 1, 4, 4, device=device), torch.randn(1, 3, 32, device=device)
    teacher.velocity(state(x_BCFHW, torch.full((1,), 0.5, device=device), text_BLD))
    return made_current


def encoded_text(folder: Path, room: int) -> tuple[Tensor, int]:
    """Text of a prompt by an encoder that has so much room on the GPU, and the bytes that it keeps there."""
    more = offload_kwargs(folder / "text_encoder", torch.bfloat16, room, folder, torch.device(GPU))
    encoder = Encoder(folder, torch.bfloat16, torch.device(GPU), **more)
    allocated = torch.cuda.memory_allocated()
    return encoder.encode("a red circle"), allocated


def host_reads_device_memory() -> None:
    ctypes.string_at(torch.zeros(4, device=GPU).data_ptr(), 4)


def on_two_devices() -> list[str]:
    """What is said of a tensor on the CPU, or on another device, beside one on this."""
    here, said = torch.ones(3, device=GPU), []
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        try:
            here + other
        except RuntimeError as error:
            said.append(str(error))
    assert torch.equal(here.to("cuda:1").cpu(), here.cpu())
    return said


def fill(mib: int) -> dict[str, Any]:
    """Take memory until there is no more; what is said, and figures at the end."""
    pieces, error = [], ""
    try:
        for _ in range(mib):
            pieces.append(torch.empty(2**20, dtype=torch.uint8, device=GPU))
    except torch.OutOfMemoryError as raised:
        error = str(raised)
    taken, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    pieces.clear()
    torch.cuda.empty_cache()
    return {"error": error, "taken": taken, "free": free, "left": torch.cuda.memory_reserved()}


def poll() -> int:
    """How often a host asks for an event before it has happened."""
    event, asked = torch.cuda.Event(), 1
    torch.ones(4, device=GPU).add_(1)
    event.record()
    while not event.query():
        asked += 1
    return asked


def sweeps(fault: str) -> bool:
    """Whether sums over streamed blocks are right when a wait is left out of the stream, or none."""
    if fault == "wait":
        block_source.Buffers.wait = lambda *_: None
    if fault == "wait_stream":
        torch.cuda.Stream.wait_stream = lambda *_: None
    blocks = nn.ModuleList(nn.Identity() for _ in range(3))
    stored = [torch.full((MANY,), n, dtype=torch.uint8, pin_memory=True) for n in range(3)]
    buffers, means = block_source.Buffers(MANY, torch.device(GPU)), []
    network = nn.Module()
    network.blocks = blocks
    block_source.BlockStream(stored, buffers).serve(network)
    for number in (0, 1, 2, 0, 1, 2):
        blocks[number](torch.ones(1, device=GPU))
        means.append(buffers.tensors[number % block_source.BUFFERS].float().mean())
    return torch.stack(means).tolist() == [0, 1, 2, 0, 1, 2]


def reduced(kind: torch.dtype) -> list[float]:
    """Collectives of NCCL's that the product and DeepSpeed call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = collectives.device()
    one = torch.full((size,), rank + 1, dtype=kind, device=device)
    summed, gathered, part = one.clone(), torch.empty(size * size, dtype=kind, device=device), one[:1].clone()
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, one)
    dist.reduce_scatter_tensor(part, one, op=dist.ReduceOp.AVG)
    dist.broadcast(one, src=1)
    return torch.cat([summed, gathered, part, one]).tolist()


def work_without_wait(wait: bool) -> None:
    work = dist.all_reduce(value := torch.ones(MANY, device=collectives.device()), async_op=True)
    if wait:
        work.wait()
    value.add_(1)


def one_collective_less() -> str:
    """What a rank is told that calls another collective than the others."""
    value = torch.ones(4, device=collectives.device())
    try:
        if dist.get_rank() == 0:
            dist.all_reduce(value)
        dist.broadcast(value, src=0)
        if dist.get_rank() == 1:
            dist.all_reduce(value)
    except RuntimeError as error:
        return str(error)
    return ""


def coded_in_tiles(device: str) -> list[Tensor]:
    """Latents and pixels of a VAE that codes in tiles, in CPU memory."""
    torch.manual_seed(0)
    vae = FittingVae.from_config(vae_of(VAE21).config).to(device)
    pixels, coded = keyed_normal((1, 3, 5, 288, 480), "pixels").to(device), []
    for code, name, shape in ((encoded, "encode", pixels.shape), (decoded, "decode", (1, 16, 2, 36, 60))):
        _, vae.chosen[name, torch.Size(shape)] = fitting(name, vae.config, shape, 0, accelerator=True)
        with torch.no_grad():
            coded.append(code(vae, coded[-1] if coded else pixels))
    assert list(vae.chosen.values()) == [True, True]
    return [value.cpu() for value in coded]


def call_often(folder: Path, name: str, times: int) -> tuple[int, int]:
    """Call a teacher of large blocks without ever waiting for the GPU.

    Returns:
        The most bytes in use there at once, and those that are planned for its weights.
    """
    from wandistiller.planner.teacher_memory import teacher_bytes

    placed, wan = placement(name, guidance_passes=1), open_wan(str(folder))
    teacher = build_teacher(wan, placed)
    x_BCFHW, text_BLD = torch.randn(1, 16, 1, 2, 2, device=GPU), torch.randn(1, 1, 32, device=GPU)
    batch = state(x_BCFHW, torch.full((1,), 0.5, device=GPU), text_BLD)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(times):
        teacher.velocity(batch)
    planned = teacher_bytes(wan, placed, collectives.world_size())
    most = torch.cuda.memory_stats()["active_bytes.all.peak"]
    return most, planned.device + planned.transient + placed.behind(wan.config)
