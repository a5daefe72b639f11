"""Advice after memory ran out: the fastest of the shipped JSONs that take less of it, and standing hints."""

import os
from collections.abc import Iterator
from itertools import islice

import torch

from wandistiller.config.job import Job
from wandistiller.engine.activation_checkpointing import SECTION
from wandistiller.engine.ds_config import dtype_name
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.hardware_rates import default_rates
from wandistiller.planner.machine import Machine
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.phase_peak import most
from wandistiller.planner.recommend import choices
from wandistiller.teacher.placement import read_placement
from wandistiller.utils import allocators
from wandistiller.utils.oom import Spent
from wandistiller.utils.system_memory import GIB

SHOWN = 3
"""Combinations of shipped JSONs that are named."""
LEAST = 0.01
"""Share of the memory in use below which a saving is not worth a line."""


def advice(job: Job, spent: Spent, machine: Machine, preparing: bool = False) -> list[str]:
    """Lines for a run that ran out of memory, computed as `wandistiller plan` does. Not collective.

    Args:
        spent: the memory that ran out.
        machine: as it was when the run began.
        preparing: the cache was being filled, so that there was no student yet.
    """
    return [*_fragmentation(spent), *_settings(job, spent, machine, preparing), *_hints(job, preparing)]


def needed(job: Job, machine: Machine, preparing: bool) -> Bytes:
    """Peak memory of a rank until it has trained a step, or while the teacher fills the cache."""
    phases = plan(job, machine)
    return (
        phases["prepare"].at("rollouts")
        if preparing
        else most({name: phases[name] for name in ("load", "train")})
    )


def taken(rank: Bytes, spent: Spent, machine: Machine) -> int:
    """Bytes of one kind of memory that a rank takes, its share of what a node's ranks share included."""
    device, host = rank.device + rank.transient, rank.host + rank.node // machine.ranks_on_node
    if machine.device_free is None:
        return device + host
    return device if spent is Spent.DEVICE else host


def _settings(job: Job, spent: Spent, machine: Machine, preparing: bool) -> Iterator[str]:
    """The fastest JSONs that fit and take less than the run's own, at its global batch and precision."""

    def need(job: Job) -> int:
        return taken(needed(job, machine, preparing), spent, machine)

    known = read_placement(job.teacher_ds).memory_known
    fits, most_of_it = (
        choices(job, machine, default_rates(machine.device_size), here=True),
        (1 - LEAST) * need(job),
    )
    less = list(islice((choice for choice in fits if not known or need(choice.job) < most_of_it), SHOWN))
    if not less:
        yield f"no student and teacher JSON of ds_configs/ take less {spent.value} and fit"
    for choice in less:
        files = f"ds_configs/student/{choice.student}.json, ds_configs/teacher/{choice.teacher}.json"
        yield f"{choice} ({files}): {choice.why(machine)}"


def _hints(job: Job, preparing: bool) -> Iterator[str]:
    """Settings that take less on any machine."""
    if preparing and job.run.prepare_batch > 1:
        yield "--prepare_batch 1"
    if not preparing and SECTION not in job.student_ds:
        yield "--gradient_checkpointing"
    if dtype_name(job.teacher_ds) == "float32":
        yield "--teacher_dtype bfloat16"
    yield "fewer frames (--num_frames), fewer pixels (--height, --width)"
    if not preparing:
        yield "a student of fewer layers (`num_layers` in its JSON, --student_config)"
    yield "fewer ranks on a node, which share its CPU memory; more nodes"


def _fragmentation(spent: Spent) -> Iterator[str]:
    """GPU memory in pieces too small to be used, if the environment turns expandable segments off."""
    given = {name: os.environ[name] for name in allocators.TORCH if name in os.environ}
    if spent is Spent.DEVICE and torch.cuda.is_available() and "expandable_segments:True" not in str(given):
        held = torch.cuda.memory_reserved()
        if (unused := held - torch.cuda.memory_allocated()) > LEAST * held:
            yield (
                f"no {', '.join(given)} in the environment, or expandable_segments:True in it: makes usable "
                f"up to {unused / GIB:.3g} GiB that lie in pieces too small to be used"
            )
