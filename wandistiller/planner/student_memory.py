"""Memory of the student on one rank under its DeepSpeed JSON, by the arithmetic of deepspeed 0.19.8.

Activations are in wan/activation_memory.py; peak_memory.py puts all together.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from wandistiller.engine.ds_config import dtype_name, offload_device, offload_section, stage
from wandistiller.engine.zero_memory import (
    Bytes,
    ParameterSize,
    gathered_bytes,
    one_at_a_time,
    partition_bytes,
    round_up,
    zero_setting,
)
from wandistiller.planner.student_network import Network
from wandistiller.utils.allocators import ROUNDED
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.transformer import numels


def start_bytes(config: dict[str, Any], experts: int) -> int:
    """Bytes of CPU memory from which every rank starts: all weights in float32."""
    return 4 * sum(numels(config).values()) * experts


@once_for_each
def student_parts(
    network: Network, experts: int, ds: dict[str, Any], ranks: int, *, accelerator: bool, ema: bool = False
) -> dict[str, Bytes]:
    """Memory of the student on one rank by name, without activations.

    Args:
        experts: networks of this kind.
        ds: its JSON, checked by `student_engine`.
        accelerator: with one, host memory may be page-locked.
        ema: with an average of its weights.
    """
    item = getattr(torch, dtype_name(ds)).itemsize
    trained, frozen = ([ParameterSize(name, numel, item) for name, numel in part.items()] for part in network)
    found = {0: _whole, 3: _partitioned}.get(stage(ds), _flat)(trained, frozen, ds, ranks, accelerator)
    if ema:
        average = 4 * sum(s.numel for s in trained) // (1 if stage(ds) == 0 else ranks)
        found[AVERAGE] = (
            Bytes(device=average)
            if offload_section(ds, "optimizer")["device"] == "none"
            else Bytes(host=average)
        )
    return {name: one_at_a_time([part] * experts) for name, part in found.items()}


def cast_bytes(network: Network, ds: dict[str, Any]) -> int:
    """Bytes of a float32 copy of all gradients, which stage 0 makes below float32; 0 for other engines.

    One at its start and two in a step, by parameter and flat, next to the gradients themselves (deepspeed
    0.19.8, FP16_Optimizer).
    """
    return 4 * sum(network.trained.values()) if stage(ds) == 0 and dtype_name(ds) != "float32" else 0


def bucket_bytes(network: Network, ds: dict[str, Any]) -> int:
    """Bytes of gradients that are sent to the other ranks at once."""
    return getattr(torch, dtype_name(ds)).itemsize * min(
        sum(network.trained.values()), zero_setting(ds, "reduce_bucket_size")
    )


def spread_bytes(network: Network, ds: dict[str, Any], ranks: int) -> int:
    """Bytes that gloo copies while ZeRO-1 and 2 send the updated weights to all ranks (deepspeed 0.19.8).

    A rank's part, and the whole before it is cut.
    """
    if stage(ds) not in (1, 2):
        return 0
    part = round_up(sum(network.trained.values()), 2 * ranks) // ranks
    return getattr(torch, dtype_name(ds)).itemsize * part * (ranks + 1)


AVERAGE = "moving average"
WEIGHTS, MASTERS, GRADIENTS, BUCKETS = "weights", "float32 weights and optimizer", "gradients", "buckets"
GATHERED, HELD = "gathered weights", "weights that backward waits for"
"""The student's parts; the last two under ZeRO-3 alone."""


def _whole(
    sizes: list[ParameterSize], frozen: list[ParameterSize], ds: dict[str, Any], ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """Memory under stage 0: everything on every rank; below float32 with a copy of the weights."""
    item, numel = sizes[0].item, sum(s.numel for s in sizes)
    masters = ((4 if item < 4 else 0) + optimizer_states(ds)) * numel
    return {
        WEIGHTS: Bytes(device=item * numel + partition_bytes(frozen, ranks=1)),
        MASTERS: Bytes(device=masters),
        GRADIENTS: Bytes(transient=item * numel),
    }


def _flat(
    sizes: list[ParameterSize], frozen: list[ParameterSize], ds: dict[str, Any], ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """Memory under ZeRO-1 and 2: all weights on every rank, of which it updates `part` elements."""
    item, numel, states = sizes[0].item, sum(s.numel for s in sizes), optimizer_states(ds)
    part = round_up(numel, 2 * ranks) // ranks
    weights, largest = (
        item * part * ranks + partition_bytes(frozen, ranks=1),
        item * max(s.numel for s in sizes),
    )
    bucket = item * min(numel, zero_setting(ds, "reduce_bucket_size"))
    adds = (
        stage(ds) == 2 and ds["gradient_accumulation_steps"] > 1
    )  # a micro-step's gradients to the earlier ones'
    gradients = item * (numel if stage(ds) == 1 else 2 * part if adds else part)
    offload = offload_section(ds, "optimizer")
    if offload["device"] == "none":
        step = 2 * item * part + (
            4 * part if item < 4 else 0
        )  # its own gradients as they came, flat, and in float32
        return {
            WEIGHTS: Bytes(device=weights),
            MASTERS: Bytes(device=(4 + states) * part),
            GRADIENTS: Bytes(transient=max(gradients + bucket, step)),
        }
    lock = _lock(offload, accelerator)
    return {
        WEIGHTS: Bytes(device=weights) + lock(item * part),
        MASTERS: Bytes(host=states * part) + lock(4 * part),
        GRADIENTS: lock(4 * part) + lock(item * numel // ranks if adds else 0),
        BUCKETS: Bytes(device=largest, transient=bucket + (gradients if stage(ds) == 1 else 0))
        + lock(largest),
    }


def _partitioned(
    sizes: list[ParameterSize], frozen: list[ParameterSize], ds: dict[str, Any], ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """Memory under ZeRO-3: on each rank a partition of `part` elements, updated in groups."""
    item, every, states = sizes[0].item, [*sizes, *frozen], optimizer_states(ds)
    part, all_parts = (partition_bytes(some, ranks) // item for some in (sizes, every))
    group = min(part, zero_setting(ds, "sub_group_size"))
    kept, transient = gathered_bytes(every, ds, ranks, reused=zero_setting(ds, "stage3_max_reuse_distance"))
    held = _held_bytes(every, ds) if transient else 0
    bucket = item * min(sum(s.numel for s in sizes), zero_setting(ds, "reduce_bucket_size"))
    step = (4 + (item if item < 4 else 0)) * group  # gradients flat, and in float32
    weights = {
        "none": Bytes(device=item * all_parts),
        "cpu": _lock({}, accelerator)(item * all_parts),
        "nvme": Bytes(
            host=item * min(all_parts, offload_section(ds, "param").get("max_in_cpu", 10**9)),
            disk=item * all_parts,
        ),
    }[offload_device(ds)]
    offload = offload_section(ds, "optimizer")
    lock = _lock(offload, accelerator)
    # on NVMe: a group's gradients next to its buffers, until the first step (deepspeed 0.19.8)
    masters, gradients = {
        "none": (Bytes(device=(4 + states) * part), Bytes(device=item * part)),
        "cpu": (Bytes(host=(4 + states) * part), lock(4 * part) + lock(item * part)),
        "nvme": (
            Bytes(4 * group, host=4 * group * offload.get("buffer_count", 4), disk=(8 + states) * part),
            lock(item * part),
        ),
    }[offload["device"]]
    # reduced gradients are there twice, in the bucket and in the order of the ranks; the step comes later
    buckets = Bytes(
        bucket, transient=max(bucket, step - transient - held if offload["device"] == "none" else 0)
    )
    return {
        WEIGHTS: weights,
        MASTERS: masters,
        GRADIENTS: gradients,
        BUCKETS: buckets,
        GATHERED: Bytes(kept, transient),
        HELD: Bytes(transient=held),
    }


def _held_bytes(sizes: list[ParameterSize], ds: dict[str, Any]) -> int:
    """Bytes of whole weights held for the backward pass: of one block, if blocks are recomputed."""
    blocks: Counter[str] = Counter()
    for s in sizes:
        blocks[".".join(s.name.split(".")[:2])] += s.part(1)
    return max(blocks.values()) if "activation_checkpointing" in ds else blocks.total()


def optimizer_states(ds: dict[str, Any]) -> int:
    """Bytes of the optimizer's state for an element."""
    return 4 if ds["optimizer"]["type"].lower() in ("lion", "adagrad") else 8


def _lock(offload: dict[str, Any], accelerator: bool) -> Callable[[int], Bytes]:
    """CPU memory for n bytes: small page-locked pieces come in powers of two."""

    def taken(n: int) -> Bytes:
        if not accelerator or not offload.get("pin_memory", True):
            return Bytes(host=n)
        whole = n if n > ROUNDED * 2**20 or not n else 1 << (n - 1).bit_length()
        return Bytes(host=whole, pinned=whole)

    return taken
