"""Advice after memory ran out: the simplest of the shipped JSONs that take less of it, and standing hints."""

import os
from collections.abc import Iterator
from itertools import islice

import torch

from wandistiller.config.job import Job
from wandistiller.distributed.device import held_memory
from wandistiller.distributed.oom import Spent
from wandistiller.planner.machine import Machine
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.phase_peak import moments
from wandistiller.planner.resolve_auto import Choice, choices
from wandistiller.utils import allocators
from wandistiller.utils.system_memory import GIB

SHOWN = 3
"""Number of combinations of shipped JSONs in the advice."""
LEAST = 0.01
"""Smallest share of the memory in use that is worth a line if it is saved."""
SAVED = 0.1
"""Smallest share of a run's memory that other JSONs must save: a plan is off by as much."""


def advice(job: Job, spent: Spent, machine: Machine, preparing: bool = False) -> list[str]:
    """Lines for a run that ran out of memory, computed as `wandistiller plan` does. Not collective.

    Args:
        machine: as it was when the run began.
        preparing: the cache was being filled, so that there was no student yet.
    """
    return [*_fragmentation(spent), *_settings(job, spent, machine, preparing), *_hints(job, preparing)]


def needed(job: Job, spent: Spent, machine: Machine, preparing: bool) -> int:
    """Peak bytes of the memory that ran out on a rank, with its share of what a node's ranks share.

    Until it has trained a step, or while the teacher fills the cache.
    """
    phases = plan(job, machine)
    load_and_train = {name: phases[name] for name in ("load", "train")}
    ranks = [phases["prepare"].at("rollouts")] if preparing else moments(load_and_train)
    if spent is Spent.DEVICE:
        return max(rank.device + rank.transient for rank in ranks)
    return max(rank.host + rank.node // machine.ranks_on_node for rank in ranks)


def _settings(job: Job, spent: Spent, machine: Machine, preparing: bool) -> Iterator[str]:
    """The simplest JSONs that fit and take less than the run's own, at its global batch and precision."""
    known = job.teacher.memory_known
    most_of_it = (1 - SAVED) * needed(job, spent, machine, preparing)

    def saves(choice: Choice) -> bool:
        return not known or needed(choice.job, spent, machine, preparing) < most_of_it

    less = list(islice(choices(job, machine, here=True, keeps_sharing=False, suits=saves), SHOWN))
    if not less:
        yield f"no student and teacher JSON of ds_configs/ take less {spent.value} and fit"
    for choice in less:
        yield f"{choice} ({', '.join(choice.files)}): {choice.why(machine)}"


def _hints(job: Job, preparing: bool) -> Iterator[str]:
    """Settings that take less on any machine."""
    if preparing and job.run.prepare_batch > 1:
        yield "--prepare_batch 1"
    if not preparing and not job.student_engine.recompute:
        yield "--gradient_checkpointing"
    if job.teacher.engine.dtype is torch.float32:
        yield "--teacher_dtype bfloat16"
    yield "fewer frames (--num_frames), fewer pixels (--height, --width)"
    if not preparing:
        yield "a student of fewer layers (`num_layers` in its JSON, --student_config)"
    yield "fewer ranks on a node, which share its CPU memory; more nodes"


def _fragmentation(spent: Spent) -> Iterator[str]:
    """GPU memory in pieces too small to be used, if the environment turns expandable segments off."""
    given = {name: os.environ[name] for name in allocators.TORCH if name in os.environ}
    if spent is Spent.DEVICE and "expandable_segments:True" not in str(given):
        held = held_memory()
        if (unused := held.reserved - held.allocated) > LEAST * held.reserved:
            yield (
                f"no {', '.join(given)} in the environment, or expandable_segments:True in it: makes usable "
                f"up to {unused / GIB:.3g} GiB that lie in pieces too small to be used"
            )
