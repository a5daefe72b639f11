"""The memory that teacher and student take of one rank, wherever their DeepSpeed JSONs place them.

The arithmetic follows deepspeed 0.19.8. Activations are footprint.py's; planner.py puts all together.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch

from wandistiller.allocators import ROUNDED
from wandistiller.deepspeed_json import dtype_name, offload_device, stage
from wandistiller.placement import read_placement
from wandistiller.wan import WanFolder, parameter_dtype, skeleton

DEFAULTS = {  # elements, where `zero_optimization` leaves them out; DeepSpeed's own
    "stage3_param_persistence_threshold": 10**5, "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9,
    "stage3_prefetch_bucket_size": 5 * 10**7, "reduce_bucket_size": 5 * 10**8, "sub_group_size": 10**9,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory that one rank takes, in bytes."""

    device: int = 0
    """Kept on its accelerator, or in CPU memory where there is none."""
    live: int = 0
    """There too, but only while a call or an optimizer step runs; an upper bound."""
    host: int = 0
    """Its own CPU memory."""
    node: int = 0
    """CPU memory that a node's ranks share, or one of them has for all; the whole of it."""
    disk: int = 0
    pinned: int = 0
    """Of `host`: page-locked."""

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def one_at_a_time(engines: list[Bytes]) -> Bytes:
    """All that these keep, but of only one at a time what it needs to work."""
    return replace(sum(engines, Bytes()), live=max(e.live for e in engines))


class Size(NamedTuple):
    """One parameter: its name, number of elements, and bytes of each."""

    name: str
    numel: int
    item: int

    def part(self, ranks: int) -> int:
        """Bytes that a rank keeps of it under ZeRO-3, padding included."""
        return -(-self.numel // ranks) * self.item


F = TypeVar("F", bound=Callable)


def once_for_each(f: F) -> F:
    """`f`, which works each answer out once: hundreds of combinations of JSONs are compared. Its arguments are JSON values."""
    known: dict[str, Any] = {}

    @wraps(f)
    def answer(*args: Any, **more: Any) -> Any:
        key = json.dumps([args, more], sort_keys=True)
        if key not in known:
            known[key] = f(*args, **more)
        return known[key]

    return answer


@once_for_each
def numels(config: dict[str, Any]) -> dict[str, int]:
    """Elements of each parameter of the transformer that `config` describes, by name."""
    return {name: p.numel() for name, p in skeleton(config).named_parameters()}


def teacher_bytes(folder: WanFolder, ds: dict[str, Any], ranks: int) -> Bytes:
    """What the teacher takes of one rank, all experts together, where `ds` (checked by `teacher_engine`) places it.

    For `owner` and `device_map` it is the owner's, for the latter as if nothing were mapped to CPU or disk.

    Args:
        ranks: those that an engine of stage 3 is cut among.
    """
    return one_at_a_time([_expert_bytes(config, ds, ranks) for config in folder.configs.values()])


@once_for_each
def _expert_bytes(config: dict[str, Any], ds: dict[str, Any], ranks: int) -> Bytes:
    dtype = getattr(torch, dtype_name(ds))
    sizes = [Size(name, numel, parameter_dtype(name, dtype).itemsize) for name, numel in numels(config).items()]
    kind, home = read_placement(ds).placement, offload_device(ds)
    if kind == "auto":
        raise ValueError("auto stands for another placement; choose it first")
    if kind != "engine" or stage(ds) == 0:
        whole = _total(sizes, ranks=1)
        return Bytes(node=whole) if read_placement(ds).on_cpu else Bytes(device=whole)
    kept, live = _gathered(sizes, ds, ranks)
    if home == "nvme":
        return Bytes(kept, live) + _swapped(sizes, ds, ranks, dtype.itemsize)
    parts = _total(sizes, ranks)
    return Bytes(kept, live, parts) if home == "cpu" else Bytes(kept + parts, live)


def _total(sizes: list[Size], ranks: int) -> int:
    return sum(s.part(ranks) for s in sizes)


def _gathered(sizes: list[Size], ds: dict[str, Any], ranks: int, reused: int = 0) -> tuple[int, int]:
    """Bytes of whole parameters on the device under ZeRO-3: those that stay there, and at most those that come and go.

    Fetching goes on below `stage3_max_live_parameters`, so one module may come on top. What several ranks gather at once
    lies there twice, until it is cut into parameters.

    Args:
        reused: elements that are not given up between forward and backward pass.
    """
    if ranks == 1 and offload_device(ds) == "none":
        return 0, 0  # the part is the whole, used where it lies
    small, modules = _zero(ds, "stage3_param_persistence_threshold"), Counter()
    for s in sizes:
        modules[s.name.rpartition(".")[0]] += s.part(1) if s.numel > small else 0
    item, largest = min(s.item for s in sizes), max(modules.values())
    available = item * max(reused, _zero(ds, "stage3_max_live_parameters")) + largest
    in_flight = item * _zero(ds, "stage3_prefetch_bucket_size") + largest if ranks > 1 else 0
    live = min(modules.total(), available) + min(modules.total(), in_flight)
    return _total(sizes, ranks=1) - modules.total(), live


def _swapped(sizes: list[Size], ds: dict[str, Any], ranks: int, item: int) -> Bytes:
    """Parts on NVMe and the buffers for them; small parts, and those of another dtype, stay in CPU memory."""
    offload, aio = ds["zero_optimization"]["offload_param"], ds.get("aio", {})
    step = 1024 * aio.get("intra_op_parallelism", 1)  # what is read and written is a multiple of it
    parts = [s.part(ranks) for s in sizes if s.item == item]
    buffer = _up(max(*parts, item * offload.get("buffer_size", 0)), step)  # as swap.to_own_folder has it
    on_disk = [part for part in parts if part >= max(2**20, aio.get("block_size", 2**20))]
    host = _total(sizes, ranks) - sum(on_disk) + offload.get("buffer_count", 5) * buffer
    return Bytes(host=host, disk=sum(_up(part, step) for part in on_disk))


def start_bytes(config: dict[str, Any], experts: int) -> int:
    """What every rank starts from in CPU memory: all weights in float32."""
    return 4 * sum(numels(config).values()) * experts


class Network(NamedTuple):
    """Elements of a student's parameters, by name."""

    trained: dict[str, int]
    frozen: dict[str, int] = {}


@once_for_each
def student_parts(
    network: Network, experts: int, ds: dict[str, Any], ranks: int, *, accelerator: bool, ema: bool = False
) -> dict[str, Bytes]:
    """What the student takes of one rank, by name; no activations.

    Args:
        experts: networks of this kind.
        ds: its JSON, checked by `student_engine`.
        accelerator: with one, host memory may be page-locked.
        ema: whether an average of its weights is kept.
    """
    item = getattr(torch, dtype_name(ds)).itemsize
    trained, frozen = ([Size(name, numel, item) for name, numel in part.items()] for part in network)
    found = {0: _whole, 3: _partitioned}.get(stage(ds), _flat)(trained, frozen, ds, ranks, accelerator)
    if ema:
        average = 4 * sum(s.numel for s in trained) // (1 if stage(ds) == 0 else ranks)
        found[AVERAGE] = Bytes(device=average) if _offload(ds, "optimizer")["device"] == "none" else Bytes(host=average)
    return {name: one_at_a_time([part] * experts) for name, part in found.items()}


def bucket_bytes(network: Network, ds: dict[str, Any]) -> int:
    """Gradients that are sent to the other ranks at once."""
    return getattr(torch, dtype_name(ds)).itemsize * min(sum(network.trained.values()), _zero(ds, "reduce_bucket_size"))


def spread_bytes(network: Network, ds: dict[str, Any], ranks: int) -> int:
    """What gloo copies while the updated weights of ZeRO-1 and 2 go to all ranks, at once (deepspeed 0.19.8): a rank's part, and
    the whole before it is cut."""
    if stage(ds) not in (1, 2):
        return 0
    part = _up(sum(network.trained.values()), 2 * ranks) // ranks
    return getattr(torch, dtype_name(ds)).itemsize * part * (ranks + 1)


AVERAGE = "moving average"
WEIGHTS, MASTERS, GRADIENTS, BUCKETS = "weights", "float32 weights and optimizer", "gradients", "buckets"
GATHERED, HELD = "gathered weights", "weights that backward waits for"
"""The student's parts; the last two under ZeRO-3 alone."""


def _whole(
    sizes: list[Size], frozen: list[Size], ds: dict[str, Any], ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """Stage 0: everything on every rank; below float32 with a copy of the weights."""
    item, numel = sizes[0].item, sum(s.numel for s in sizes)
    masters = ((4 if item < 4 else 0) + optimizer_states(ds)) * numel
    return {WEIGHTS: Bytes(device=item * numel + _total(frozen, ranks=1)), MASTERS: Bytes(device=masters),
            GRADIENTS: Bytes(live=item * numel)}  # fmt: skip


def _flat(
    sizes: list[Size], frozen: list[Size], ds: dict[str, Any], ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """ZeRO-1 and 2: all weights on every rank, of which it updates its part of `part` elements."""
    item, numel, states = sizes[0].item, sum(s.numel for s in sizes), optimizer_states(ds)
    part = _up(numel, 2 * ranks) // ranks
    weights, largest = item * part * ranks + _total(frozen, ranks=1), item * max(s.numel for s in sizes)
    bucket = item * min(numel, _zero(ds, "reduce_bucket_size"))
    adds = stage(ds) == 2 and ds["gradient_accumulation_steps"] > 1  # a micro-step's gradients to the earlier ones'
    gradients = item * (numel if stage(ds) == 1 else 2 * part if adds else part)
    offload = _offload(ds, "optimizer")
    if offload["device"] == "none":
        step = 2 * item * part + (4 * part if item < 4 else 0)  # its own gradients as they came, flat, and in float32
        return {WEIGHTS: Bytes(device=weights), MASTERS: Bytes(device=(4 + states) * part),
                GRADIENTS: Bytes(live=max(gradients + bucket, step))}  # fmt: skip
    lock = _lock(offload, accelerator)
    return {
        WEIGHTS: Bytes(device=weights) + lock(item * part),
        MASTERS: Bytes(host=states * part) + lock(4 * part),
        GRADIENTS: lock(4 * part) + lock(item * numel // ranks if adds else 0),
        BUCKETS: Bytes(device=largest, live=bucket + (gradients if stage(ds) == 1 else 0)) + lock(largest),
    }


def _partitioned(
    sizes: list[Size], frozen: list[Size], ds: dict[str, Any], ranks: int, accelerator: bool
) -> dict[str, Bytes]:
    """ZeRO-3: a part of `part` elements of everything on each rank, updated in groups."""
    item, every, states = sizes[0].item, [*sizes, *frozen], optimizer_states(ds)
    part, all_parts = (_total(some, ranks) // item for some in (sizes, every))
    group = min(part, _zero(ds, "sub_group_size"))
    kept, live = _gathered(every, ds, ranks, reused=_zero(ds, "stage3_max_reuse_distance"))
    blocks = Counter()  # autograd holds the weights that it will go back through: of one block, if others are computed anew
    for s in every if live else ():
        blocks[".".join(s.name.split(".")[:2])] += s.part(1)
    held = max(blocks.values(), default=0) if "activation_checkpointing" in ds else blocks.total()
    bucket = item * min(sum(s.numel for s in sizes), _zero(ds, "reduce_bucket_size"))
    step = (4 + (item if item < 4 else 0)) * group  # gradients flat, and in float32
    weights = {
        "none": Bytes(device=item * all_parts),
        "cpu": _lock({}, accelerator)(item * all_parts),
        "nvme": Bytes(host=item * min(all_parts, _offload(ds, "param").get("max_in_cpu", 10**9)), disk=item * all_parts),
    }[offload_device(ds)]
    offload = _offload(ds, "optimizer")
    lock = _lock(offload, accelerator)
    # on NVMe: a group's gradients beside its buffers, until the first step (deepspeed 0.19.8, initialize_optimizer_states)
    masters, gradients = {
        "none": (Bytes(device=(4 + states) * part), Bytes(device=item * part)),
        "cpu": (Bytes(host=(4 + states) * part), lock(4 * part) + lock(item * part)),
        "nvme": (Bytes(4 * group, host=4 * group * offload.get("buffer_count", 4), disk=(8 + states) * part), lock(item * part)),
    }[offload["device"]]  # fmt: skip
    # what is reduced is there twice: in the bucket, and in the order of the ranks; the step comes when all weights are back
    buckets = Bytes(bucket, live=max(bucket, step - live - held if offload["device"] == "none" else 0))
    return {WEIGHTS: weights, MASTERS: masters, GRADIENTS: gradients, BUCKETS: buckets,
            GATHERED: Bytes(kept, live), HELD: Bytes(live=held)}  # fmt: skip


def optimizer_states(ds: dict[str, Any]) -> int:
    """Bytes that the optimizer keeps for an element."""
    return 4 if ds["optimizer"]["type"].lower() in ("lion", "adagrad") else 8


def _zero(ds: dict[str, Any], key: str) -> int:
    return int(ds["zero_optimization"].get(key, DEFAULTS[key]))


def _offload(ds: dict[str, Any], what: str) -> dict[str, Any]:
    return {"device": "none"} | ds["zero_optimization"].get(f"offload_{what}", {})


def _lock(offload: dict[str, Any], accelerator: bool) -> Callable[[int], Bytes]:
    """CPU memory for n bytes: small page-locked pieces come in powers of two."""

    def taken(n: int) -> Bytes:
        if not accelerator or not offload.get("pin_memory", True):
            return Bytes(host=n)
        whole = n if n > ROUNDED * 2**20 or not n else 1 << (n - 1).bit_length()
        return Bytes(host=whole, pinned=whole)

    return taken


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
