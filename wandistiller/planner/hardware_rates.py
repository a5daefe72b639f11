"""Rates of arithmetic and of transfers: given by the user, defaults by kind of GPU, or measured here."""

import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Gt, Lt

from wandistiller.distributed import collectives
from wandistiller.distributed.device import synchronize
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.system_memory import GIB
from wandistiller.utils.validation import check, types_of
from wandistiller.wan.flops import forward_flops
from wandistiller.wan.transformer import (
    blank_state,
    meta_transformer,
    parameter_dtype,
    set_parameter,
    usual_config,
    velocity,
)

Rate = Annotated[float, Gt(0), Lt(10**9)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank, unless the note names a node."""

    tflops: Rate
    """10^12 operations of products and attention in each second that a transformer takes, in the engine's
    precision, on the accelerator or CPU."""
    cpu_tflops: Rate
    """10^12 operations a second of all cores of a node together."""
    pcie: Rate
    """10^9 bytes a second between CPU memory and the accelerator, one way."""
    link: Rate
    """10^9 bytes a second from one rank to another of its node."""
    network: Rate
    """10^9 bytes a second that all ranks of a node together send to other nodes."""
    memory: Rate
    """10^9 bytes a second of a node's CPU memory, read and written together."""
    disk: Rate
    """10^9 bytes a second read from a node's disk."""


GPU = {
    16: Rates(tflops=30, cpu_tflops=1, pcie=12, link=10, network=1.2, memory=50, disk=3),
    24: Rates(tflops=100, cpu_tflops=1, pcie=24, link=20, network=1.2, memory=60, disk=5),
    48: Rates(tflops=150, cpu_tflops=2, pcie=24, link=20, network=12, memory=150, disk=5),
    40: Rates(tflops=200, cpu_tflops=3, pcie=24, link=200, network=100, memory=200, disk=5),
    80: Rates(tflops=200, cpu_tflops=3, pcie=24, link=200, network=100, memory=200, disk=5),
}
"""Rates by GiB of a GPU, in bf16: V100; RTX 4090; L40S or A6000 Ada; A100 40 and 80 GB.

Round numbers below the makers' peak, with 10, 10, 100, 800 and 800 Gbit/s between nodes; `--measure` and
`--rates` replace them."""
NAMED = {
    "B200": Rates(tflops=1000, cpu_tflops=4, pcie=50, link=700, network=100, memory=400, disk=5),
    "H200": Rates(tflops=500, cpu_tflops=4, pcie=50, link=350, network=100, memory=400, disk=5),
    "H100": Rates(tflops=450, cpu_tflops=4, pcie=50, link=350, network=100, memory=400, disk=5),
    "5090": Rates(tflops=170, cpu_tflops=1, pcie=48, link=20, network=1.2, memory=70, disk=5),
    "3090": Rates(tflops=60, cpu_tflops=1, pcie=24, link=20, network=1.2, memory=50, disk=5),
    "L40S": GPU[48],
    "L40": Rates(tflops=85, cpu_tflops=2, pcie=24, link=20, network=12, memory=150, disk=5),
    "L4": Rates(tflops=55, cpu_tflops=1, pcie=12, link=10, network=12, memory=100, disk=5),
    "A10": Rates(tflops=40, cpu_tflops=1, pcie=24, link=20, network=12, memory=100, disk=5),
    "A6000": Rates(tflops=75, cpu_tflops=2, pcie=24, link=20, network=12, memory=150, disk=5),
}
"""Rates by a part of a GPU's name, where its memory alone would give those of another; the first that fits.

About half of the makers' peak of dense products in bf16: 2,250, 990, 181, 121, 70 (A10G) and 155 TFLOP/s."""
CPU_ONLY = Rates(tflops=0.05, cpu_tflops=0.2, pcie=10, link=5, network=1.2, memory=20, disk=1)
"""Rates of a few cores in float32."""
EMULATION = 10
"""Times as long as in float32 that a CPU's products take in bf16 where it is emulated: 6 to 56."""
MEASURED = 3
"""Measurements of each rate; the best counts."""
SIZES = ((4, 1, 32), (12, 1, 80), (40, 4, 80))
"""Heads, samples and side of the latents of the blocks that are measured: a small one's, 1.3B's and 14B's."""
LONG_ENOUGH = 0.02
"""Seconds after which no larger one is needed."""
SMALL = 0.02
"""Standard deviation of their weights."""


def default_rates(device_bytes: int | None, name: str = "", *, emulated: bool = False) -> Rates:
    """Rates of the GPU of that name, or of the largest known kind with no more memory; of a CPU for None.

    Args:
        emulated: a CPU computes in bf16 without instructions for it.
    """
    if device_bytes is None:
        return replace(CPU_ONLY, tflops=CPU_ONLY.tflops / EMULATION) if emulated else CPU_ONLY
    if known := next((rates for part, rates in NAMED.items() if re.search(rf"{part}(?!\d)", name)), None):
        return known
    return GPU[max((gib for gib in GPU if gib <= 1.1 * device_bytes / GIB), default=min(GPU))]


def override_rates(base: Rates, given: dict[str, Any]) -> Rates:
    """Replace the rates of `base` that the user gives.

    Raises:
        ConfigError: for other keys than those of Rates, and for values that are no positive numbers.
    """
    problems, given = check("command line", given, types_of(Rates), "rates.")
    if problems:
        raise ConfigError(*problems)
    return replace(base, **given)


@torch.no_grad()
def measure_rates(folder: Path, dtype: torch.dtype) -> dict[str, float]:
    """Measure this machine, by names of Rates; none of a GPU, link or network that is not there. Collective.

    All ranks measure at once, as they work in a run; the shares of a node's ranks are added up. The slowest
    rank and node count. Takes some seconds.

    Args:
        folder: on the disk to measure.
    """
    device, cpu = torch.device(collectives.device()), torch.device("cpu")
    peers = collectives.node_peers()
    measured = {
        "tflops": _blocks(device, dtype),
        "memory": len(peers) * _copies(cpu, cpu),
        "disk": len(peers) * _reads(folder),
    }
    if device.type != "cpu":
        measured |= {"pcie": _copies(cpu, device), "cpu_tflops": len(peers) * _blocks(cpu, dtype)}
    else:
        measured["cpu_tflops"] = len(peers) * measured["tflops"]
    nodes = sorted(set(map(tuple, collectives.gather_objects(peers))))
    if max(map(len, nodes)) > 1:
        measured["link"] = _gathers(peers)
    if len(nodes) > 1:  # the first ranks of all nodes, the second ones, ...: as many paths as ranks of a node
        place = peers.index(collectives.rank())
        measured["network"] = len(peers) * _gathers([ranks[place] for ranks in nodes if len(ranks) > place])
    of_ranks = collectives.gather_objects(measured)
    return {name: float(f"{min(rates[name] for rates in of_ranks):.3g}") for name in measured}


def _seconds(work: Callable[[], object]) -> float:
    """Least seconds of `work` on all ranks, which begin together, after a first time. Collective."""
    work()
    seconds = []
    for _ in range(MEASURED):
        collectives.gather_objects(None)
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return min(map(max, zip(*collectives.gather_objects(seconds), strict=True)))


def _blocks(device: torch.device, dtype: torch.dtype) -> float:
    """10^12 operations a second of a forward pass through a block, of as large a size as takes long enough.

    Products of random numbers alone are 1.6 to 1.9 times as fast, those of equal numbers 2.1 times (H100,
    torch 2.11, one frame and 81: tests/gpu/stream_14b.py, tests/gpu/measure.py kernels).
    """
    text_dim, took, call = 64, 0.0, None
    for heads, samples, side in SIZES:
        sizes = {"num_attention_heads": heads, "ffn_dim": 346 * heads, "text_dim": text_dim}
        config = usual_config(num_layers=1, **sizes)
        model, latent = meta_transformer(config, device), (16, 1, side, side)
        for name, p in list(model.named_parameters()):
            own = parameter_dtype(name, dtype)
            set_parameter(model, name, torch.randn(p.shape, device=device, dtype=own) * SMALL)
        state = blank_state(config, latent, samples, device=device)
        state = state.with_tensors([torch.randn_like(t) for t in state.tensors()])
        call = partial(velocity, model, state)
        call().sum().item()  # starts the libraries
        began = time.perf_counter()
        call().sum().item()
        took = time.perf_counter() - began
        if took > LONG_ENOUGH:
            break
    return samples * forward_flops(config, latent) / _seconds(call) / 1e12


def _copies(source: torch.device, target: torch.device) -> float:
    """10^9 bytes a second; within CPU memory each is read and written."""
    locked = target.type != "cpu"
    block = torch.ones(2**28, dtype=torch.uint8, device=source, pin_memory=locked)
    into = torch.empty_like(block, device=target)
    return (1 if locked else 2) * block.numel() / _seconds(lambda: into.copy_(block)) / 1e9


def _reads(folder: Path) -> float:
    """10^9 bytes a second of a file that is not in the file cache."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(2**20) * 256)
        file.flush()
        os.fsync(file.fileno())

        def read() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(2**24):
                pass

        return 2**28 / _seconds(read) / 1e9


def _gathers(peers: list[int]) -> float:
    """10^9 bytes a second that a rank receives while each of `peers` sends to all others."""
    group, block = collectives.group(peers), torch.ones(2**24, device=collectives.device())
    seconds = _seconds(lambda: collectives.gather_tensor(block, group))
    return max(1, len(peers) - 1) * block.nbytes / seconds / 1e9
