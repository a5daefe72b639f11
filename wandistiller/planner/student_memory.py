"""Memory of the student on one rank under its DeepSpeed JSON, by the arithmetic of deepspeed 0.19.8.

Activations are in network/activation_memory.py; peak_memory.py adds everything up.
"""

from collections import Counter
from functools import partial
from typing import Any

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.zero_memory import (
    Bytes,
    ParameterSize,
    gathered_bytes,
    one_at_a_time,
    partition_bytes,
    round_up,
)
from wandistiller.network.names import block_of, is_in_block
from wandistiller.network.network import Parameters
from wandistiller.utils.memoize import once_for_each
from wandistiller.utils.system_memory import PINNED_ROUNDED

MODULE_WEIGHTS, MASTERS = "weights", "float32 weights and optimizer"
GRADIENTS, BUCKETS = "gradients", "buckets"
GATHERED, HELD = "gathered weights", "weights that backward waits for"
"""The student's parts; these two under ZeRO-3 alone."""
AVERAGE = "moving average"
MOMENTS = 8
"""Bytes of Adam's state for an element."""


@once_for_each
def student_parts(
    network: Parameters,
    experts: int,
    engine: EngineConfig,
    ranks: int,
    *,
    accelerator: bool,
    ema: bool = False,
) -> dict[str, Bytes]:
    """Memory of the student on one rank by name, without activations.

    Args:
        experts: networks of this kind.
        accelerator: with one, host memory may be page-locked.
        ema: with an average of its weights.
    """
    if engine.stage == 0:
        parts = _whole(network, engine)
    elif engine.stage == 3:
        parts = _partitioned(network, engine, ranks, accelerator)
    else:
        parts = _flat(network, engine, ranks, accelerator)
    if ema:
        average = 4 * network.trained_numel // (1 if engine.stage == 0 else ranks)
        on_device = engine.optimizer_on == "none"
        parts[AVERAGE] = Bytes(device=average) if on_device else Bytes(host=average)
    return {name: one_at_a_time([part] * experts) for name, part in parts.items()}


def cast_bytes(network: Parameters, engine: EngineConfig) -> int:
    """Bytes of a float32 copy of all gradients, which stage 0 makes below float32; 0 for other engines.

    One at its start and two in a step, by parameter and flat, next to the gradients themselves (deepspeed
    0.19.8, FP16_Optimizer).
    """
    return 4 * network.trained_numel if engine.stage == 0 and engine.dtype.itemsize < 4 else 0


def bucket_bytes(network: Parameters, engine: EngineConfig) -> int:
    """Bytes for gradients on their way to other ranks, twice where the next are computed meanwhile."""
    at_once = engine.dtype.itemsize * min(network.trained_numel, engine.zero.reduce_bucket_size)
    return at_once * (2 if engine.stage < 3 and engine.zero.overlap_comm else 1)


def spread_bytes(network: Parameters, engine: EngineConfig, ranks: int) -> int:
    """Bytes that gloo copies while ZeRO-1 and 2 send the updated weights to all ranks (deepspeed 0.19.8).

    A rank's part, and the whole before it is cut.
    """
    if engine.stage not in (1, 2):
        return 0
    part = round_up(network.trained_numel, 2 * ranks) // ranks
    return engine.dtype.itemsize * part * (ranks + 1)


def _whole(network: Parameters, engine: EngineConfig) -> dict[str, Bytes]:
    """Memory under stage 0: everything on every rank; below float32 with a copy of the weights."""
    item, numel = engine.dtype.itemsize, network.trained_numel
    masters = ((4 if item < 4 else 0) + MOMENTS) * numel
    return {
        MODULE_WEIGHTS: Bytes(device=item * (numel + network.frozen_numel)),
        MASTERS: Bytes(device=masters),
        GRADIENTS: Bytes(transient=item * numel),
    }


def _flat(network: Parameters, engine: EngineConfig, ranks: int, accelerator: bool) -> dict[str, Bytes]:
    """Memory under ZeRO-1 and 2: all weights on every rank, of which it updates `part` elements."""
    item, numel = engine.dtype.itemsize, network.trained_numel
    part, largest = round_up(numel, 2 * ranks) // ranks, item * max(network.trained.values())
    weights, bucket = item * (part * ranks + network.frozen_numel), bucket_bytes(network, engine)
    # a micro-step's gradients are added to the earlier ones'
    adds = engine.stage == 2 and engine.batch.accumulation > 1
    gradients = item * (numel if engine.stage == 1 else 2 * part if adds else part)
    offload = engine.offload("optimizer")
    if offload["device"] == "none":
        # its own gradients as they came, flat, and in float32
        step = 2 * item * part + (4 * part if item < 4 else 0)
        # what another stream has allocated is not free for the one that computes (torch 2.13)
        overlaps = engine.zero.overlap_comm and accelerator
        kept_apart = gradients if overlaps else 0
        return {
            MODULE_WEIGHTS: Bytes(device=weights),
            MASTERS: Bytes(device=(4 + MOMENTS) * part),
            GRADIENTS: Bytes(transient=max(gradients + bucket, step) + kept_apart),
        }
    lock = partial(_locked, offload, accelerator)
    transient = bucket + (gradients if engine.stage == 1 else 0)
    return {
        MODULE_WEIGHTS: Bytes(device=weights) + lock(item * part),
        MASTERS: Bytes(host=MOMENTS * part) + lock(4 * part),
        GRADIENTS: lock(4 * part) + lock(item * numel // ranks if adds else 0),
        BUCKETS: Bytes(device=largest, transient=transient) + lock(largest),
    }


def _partitioned(
    network: Parameters, engine: EngineConfig, ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """Memory under ZeRO-3: on each rank a partition of `part` elements, updated in groups."""
    item, bucket = engine.dtype.itemsize, bucket_bytes(network, engine)
    trained, frozen = ([ParameterSize(name, numel, item) for name, numel in part.items()] for part in network)
    every = [*trained, *frozen]
    part, all_parts = (partition_bytes(sizes, ranks) // item for sizes in (trained, every))
    group = min(part, engine.zero.sub_group_size)
    reused = engine.zero.max_reuse_distance
    persistent, transient = gathered_bytes(every, engine, ranks, reused)
    held = _held_bytes(every, engine) if transient else 0
    in_cpu = min(all_parts, engine.offload("param").get("max_in_cpu", 10**9))
    weights = {
        "none": Bytes(device=item * all_parts),
        "cpu": _locked({}, accelerator, item * all_parts),
        "nvme": Bytes(host=item * in_cpu, disk=item * all_parts),
    }
    offload = engine.offload("optimizer")
    lock = partial(_locked, offload, accelerator)
    # on NVMe: a group's gradients next to its buffers, until the first step (deepspeed 0.19.8)
    buffers = 4 * group * offload.get("buffer_count", 4)
    masters, gradients = {
        "none": (Bytes(device=(4 + MOMENTS) * part), Bytes(device=item * part)),
        "cpu": (Bytes(host=(4 + MOMENTS) * part), lock(4 * part) + lock(item * part)),
        "nvme": (Bytes(4 * group, host=buffers, disk=(8 + MOMENTS) * part), lock(item * part)),
    }[offload["device"]]
    # reduced gradients are there twice, in the bucket and in the order of the ranks; in the step, which comes
    # later, they are flat and in float32
    step = (4 + (item if item < 4 else 0)) * group
    later = step - transient - held if offload["device"] == "none" else 0
    return {
        MODULE_WEIGHTS: weights[engine.weights_on],
        MASTERS: masters,
        GRADIENTS: gradients,
        BUCKETS: Bytes(bucket, transient=max(bucket, later)),
        GATHERED: Bytes(persistent, transient),
        HELD: Bytes(transient=held),
    }


def _held_bytes(sizes: list[ParameterSize], engine: EngineConfig) -> int:
    """Bytes of whole weights held for the backward pass: of blocks that are not recomputed, at least one."""
    blocks: Counter[str] = Counter()
    for s in sizes:
        blocks[block_of(s.name)] += s.part(1)
    layers = sum(map(is_in_block, blocks))
    again = len(engine.recompute.recomputed(layers)) if engine.recompute else 0
    return max(1, layers - again) * max(blocks.values()) if again else blocks.total()


def _locked(offload: dict[str, Any], accelerator: bool, n: int) -> Bytes:
    """CPU memory for n bytes, page-locked where `offload` says so: small pieces come in powers of two."""
    if not accelerator or not offload.get("pin_memory", True):
        return Bytes(host=n)
    return Bytes(host=n if n > PINNED_ROUNDED * 2**20 or not n else 1 << (n - 1).bit_length())
