"""What would help a run whose memory ran out, in order of cost, computed for this run as the planner computes."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from wandistiller import allocators
from wandistiller.config import STRATEGIES, read_json
from wandistiller.deepspeed_json import BatchSize, dtype_name, student_engine, teacher_engine, with_dtype
from wandistiller.engines import config_problems
from wandistiller.exhausted import Spent
from wandistiller.job import Job
from wandistiller.machine import GIB, Machine, candidates, machine_now, placed
from wandistiller.memory import Bytes
from wandistiller.placement import BLOCK, Placement, read_placement, without_block
from wandistiller.planner import UNKNOWN, most, plan
from wandistiller.problems import ConfigError
from wandistiller.recompute import SECTION, Recompute, read_recompute
from wandistiller.student_json import ACCUMULATION, MICRO
from wandistiller.tuning import tuning_problems

STUDENT_JSONS = ("zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_offload_all", "zero3_nvme")
"""In ds_configs/student/, the fastest first."""
LEAST = 0.01
"""Share of what a rank takes of the memory that ran out, below which a change is not worth a line."""


class Change(NamedTuple):
    """Something that a user may change, alone."""

    how: str
    """The exact flag or JSON."""
    settings: dict[str, Any]
    """The same, as settings of the run."""
    after: Job
    """The run with it; of its settings only those are right that memory depends on."""


class Saving(NamedTuple):
    """A change, and the bytes that a rank takes less of what ran out, and more of the other memory and of disk."""

    change: Change
    saves: int
    costs: int
    disk: int

    def __str__(self) -> str:
        more = ((self.costs, "of the other memory"), (self.disk, "of disk"))
        takes = " and ".join(f"{n / GIB:.3g} GiB {where}" for n, where in more if n > 0)
        return f"{self.change.how}: saves {self.saves / GIB:.3g} GiB a rank" + (f", takes {takes}" if takes else "")


def advice(job: Job, spent: Spent, preparing: bool = False) -> list[str]:
    """A line for each setting of `job` that would have saved some of the memory that ran out, the cheapest first.

    Each has the flag or the JSON to write, and what it saves by itself. Those up to the precision leave the loss curve as
    it is. Not collective; loads nothing.

    Args:
        preparing: the cache was being filled, so that there was no student yet.
    """
    lines = [*_allocator(spent), *map(str, savings(job, spent, machine_now(), preparing))]
    return lines or [f"No setting of this run saves {spent.value}. What helps is more of it, or fewer ranks that share it."]


def savings(job: Job, spent: Spent, machine: Machine, preparing: bool = False) -> Iterator[Saving]:
    """What `advice` tells, of a run on `machine`. Of several ways to one end a costlier one is told if it saves more."""
    training = (_student_engines, _teachers, _passes, _micro_batches, _checkpointing, _teacher_precision, _student_precision,
                _frames, _pixels, _layers)  # fmt: skip
    filling = (_prepare_batches, _passes, _teachers, _teacher_precision, _frames, _pixels)
    for ways in filling if preparing else training:
        before = needed(job, machine, preparing)
        best = LEAST * taken(before, spent, machine)
        for change in ways(job, machine):
            after = needed(change.after, machine, preparing)
            found = Saving(change, taken(before, spent, machine) - taken(after, spent, machine),
                           _elsewhere(after, spent, machine) - _elsewhere(before, spent, machine),
                           after.disk - before.disk)  # fmt: skip
            if found.saves > best and _has_room(found, spent, machine) and _is_accepted(change.after, job):
                best = found.saves
                yield found


def needed(job: Job, machine: Machine, preparing: bool = False) -> Bytes:
    """The most that a rank of `job` takes until it has trained a step, or while the teacher fills the cache."""
    phases = plan(job, machine)
    return phases["prepare"].at("rollouts") if preparing else most({name: phases[name] for name in ("load", "train")})


def taken(rank: Bytes, spent: Spent, machine: Machine) -> int:
    """Bytes of one kind of memory that a rank takes, its share of what a node's ranks share included."""
    device, host = rank.device + rank.live, rank.host + rank.node // machine.ranks_on_node
    if machine.device_free is None:
        return device + host
    return device if spent is Spent.DEVICE else host


def _elsewhere(rank: Bytes, spent: Spent, machine: Machine) -> int:
    """What a rank takes of the memory that did not run out; nothing where there is but one."""
    other = Spent.HOST if spent is Spent.DEVICE else Spent.DEVICE
    return 0 if machine.device_free is None else taken(rank, other, machine)


def _has_room(found: Saving, spent: Spent, machine: Machine) -> bool:
    """Whether what a change takes elsewhere is free there."""
    room = machine.host_free // machine.ranks_on_node if spent is Spent.DEVICE else machine.device_free or 0
    return found.costs <= room and found.disk * machine.ranks_on_node <= machine.disk_free


def _is_accepted(after: Job, before: Job) -> bool:
    """Whether DeepSpeed, this machine and the run's other settings take engines that were changed."""
    changed = [ds for ds, was in ((after.student_ds, before.student_ds), (after.teacher_ds, before.teacher_ds)) if ds is not was]
    return not any(config_problems("", without_block(ds)) for ds in changed) and (
        after.student_ds is before.student_ds or not tuning_problems(after.run, after.student_transformer, after.student_ds)
    )


def _allocator(spent: Spent) -> Iterator[str]:
    """On a GPU, memory that torch holds in pieces too small to be used, if the user keeps it from growing its segments."""
    said = {name: os.environ[name] for name in allocators.TORCH if name in os.environ}
    if spent is Spent.DEVICE and torch.cuda.is_available() and "expandable_segments:True" not in str(said):
        held = torch.cuda.memory_reserved()
        if (unused := held - torch.cuda.memory_allocated()) > LEAST * held:
            yield (f"no {', '.join(said)} in the environment, or expandable_segments:True in it: makes usable up to "
                   f"{unused / GIB:.3g} GiB that lie in pieces too small to be used")  # fmt: skip


def _student_engines(job: Job, _: Machine) -> Iterator[Change]:
    """Other homes of the student's optimizer and weights, none of which loses an offload that the run has."""
    own = job.student_ds["zero_optimization"]
    homes = ("offload_param", "offload_optimizer")
    offloaded = {key: own[key] for key in homes if own.get(key, {}).get("device", "none") != "none"}
    for name in STUDENT_JSONS:
        file = f"ds_configs/student/{name}.json"
        ours = read_json(file)
        zero = {key: ours["zero_optimization"][key] for key in ("stage", *homes) if key in ours["zero_optimization"]}
        if offloaded.keys() <= zero.keys():
            zero |= {key: section for key, section in offloaded.items() if section["device"] == zero[key]["device"]}
            more = {key: ours[key] for key in ("aio",) if key in ours and key not in job.student_ds}
            yield from _student_json(job, {"zero_optimization": own | zero} | more, {"zero_optimization": zero} | more,
                                     f", as in {file}")  # fmt: skip


def _student_json(job: Job, new: dict[str, Any], said: dict[str, Any], note: str = "") -> Iterator[Change]:
    """The change to these parts of the student's JSON.

    Args:
        new: top-level keys and what they become.
        said: what of it a user has to write.
    """
    try:
        ds, batch = student_engine("", job.student_ds | new, job.batch.ranks)
    except ConfigError:
        return  # it does not go with the rest of the JSON
    how = f"in the student's JSON {json.dumps(said)[1:-1]}{note}"
    yield Change(how, {"deepspeed_config": job.student_ds | new}, replace(job, student_ds=ds, batch=batch))


def _teachers(job: Job, machine: Machine) -> Iterator[Change]:
    """Other shipped placements of the teacher, in its precision."""
    asked, dtype = read_placement(job.teacher_ds), dtype_name(job.teacher_ds)
    flags = {STRATEGIES[short]: f"--teacher_device_strategy {short}" for short in STRATEGIES}
    for name in candidates(machine) if asked.placement not in UNKNOWN else ():
        ours = placed(name, dtype) | ({BLOCK: kept} if (kept := _block(name, asked)) else {})
        ds = teacher_engine(name, ours, machine.ranks)
        file = f"ds_configs/teacher/{name}.json"
        how, settings = flags.get(name, f"--teacher_deepspeed_config {file}"), {"teacher_deepspeed_config": ours}
        if ours != read_json(file):
            how += f" --teacher_dtype {dtype}"
        if asked.guidance_passes != 1:
            how = f"in the recipe {json.dumps(settings)[1:-1]}"
        yield Change(how, settings, replace(job, teacher_ds=ds))


def _block(name: str, asked: Placement) -> dict[str, Any]:
    """The block "wandistiller" of the teacher JSON `name`, with the guidance passes that the run has."""
    block = read_json(f"ds_configs/teacher/{name}.json").get(BLOCK, {})
    return block | ({"guidance_passes": asked.guidance_passes} if asked.guidance_passes != 1 else {})


def _passes(job: Job, _: Machine) -> Iterator[Change]:
    if read_placement(job.teacher_ds).guidance_passes == 1:
        said = job.teacher_ds.get(BLOCK, {}) | {"guidance_passes": 2}
        ds = job.teacher_ds | {BLOCK: said}
        yield Change(f"in the teacher's JSON {json.dumps({BLOCK: said})[1:-1]}", {"teacher_deepspeed_config": ds},
                     replace(job, teacher_ds=ds))  # fmt: skip


def _micro_batches(job: Job, _: Machine) -> Iterator[Change]:
    """Half the samples of a micro-step, and one, at the same global batch."""
    b = job.batch
    for micro in sorted({b.micro // 2 if b.micro % 2 == 0 else 1, 1} - {b.micro}, reverse=True):
        batch = BatchSize(micro, b.accumulation * b.micro // micro, b.total)
        new = {MICRO: micro, ACCUMULATION: batch.accumulation}
        yield from _student_json(job, new, new, f" (the batch of {b.total} and the result stay the same)")


def _prepare_batches(job: Job, _: Machine) -> Iterator[Change]:
    if job.run.prepare_batch > 1:
        yield from _setting(job, prepare_batch=1)


def _checkpointing(job: Job, _: Machine) -> Iterator[Change]:
    again = read_recompute(job.student_ds)
    if again is None:
        new = {SECTION: {"partition_activations": False}}
        for change in _student_json(job, new, new):
            yield change._replace(how="--gradient_checkpointing", settings={"gradient_checkpointing": True})
    elif again != Recompute():
        new = {BLOCK: {"checkpoint": "blocks", "checkpoint_every": 1}}
        yield from _student_json(job, new, new)


def _teacher_precision(job: Job, _: Machine) -> Iterator[Change]:
    if dtype_name(job.teacher_ds) == "float32":
        how = {"teacher_dtype": "bfloat16"}
        yield Change(_flags(how), how, replace(job, teacher_ds=with_dtype(job.teacher_ds, "bfloat16")))


def _student_precision(job: Job, _: Machine) -> Iterator[Change]:
    if dtype_name(job.student_ds) == "float32":
        new = {"bf16": {"enabled": True}}
        yield from _student_json(job, new, new)


def _frames(job: Job, _: Machine) -> Iterator[Change]:
    """About half the frames, 4k + 1."""
    step = job.folder.temporal
    if job.run.num_frames > 1:
        yield from _setting(job, num_frames=(job.run.num_frames - 1) // step // 2 * step + 1)


def _pixels(job: Job, _: Machine) -> Iterator[Change]:
    """About half the height and width, where the recipe does not list sizes of its own."""
    patch, spatial = job.folder.config["patch_size"], job.folder.spatial
    height, width = (max(1, n // (2 * spatial * p)) * spatial * p
                     for n, p in ((job.run.height, patch[1]), (job.run.width, patch[2])))  # fmt: skip
    if isinstance(job.run.buckets, bool):
        yield from _setting(job, height=height, width=width)


def _setting(job: Job, **values: int) -> Iterator[Change]:
    yield Change(_flags(values), values, replace(job, run=replace(job.run, **values)))


def _flags(values: dict[str, Any]) -> str:
    return " ".join(f"--{key} {value}" for key, value in values.items())


def _layers(job: Job, _: Machine) -> Iterator[Change]:
    """A student of half as many layers, where its JSON is what says how many it has."""
    layers = job.student_transformer["num_layers"]
    if layers > 1 and job.student.init in ("teacher", "random"):
        said = {"num_layers": layers // 2} | ({"keep_layers": "uniform"} if isinstance(job.student.keep_layers, list) else {})
        given = job.run.student_config
        settings = {"student_config": (given if isinstance(given, dict) else read_json(given)) | said}
        yield Change(f"in the student's architecture {json.dumps(said)[1:-1]}", settings,
                     replace(job, student_transformer=job.student_transformer | {"num_layers": layers // 2}))  # fmt: skip
