"""Settles what a run leaves to the machine: a student's engine or a teacher's placement that is `auto`."""

from wandistiller import distributed
from wandistiller.config import AUTO
from wandistiller.deepspeed_json import dtype_name
from wandistiller.job import Job
from wandistiller.machine import Machine, this_machine
from wandistiller.placement import read_placement
from wandistiller.problems import ConfigError
from wandistiller.rates import usual
from wandistiller.recommend import Choice, fitting, ranked
from wandistiller.written import on_its_disk, swap_folder

TOLD = 3
"""Combinations that a refusal tells of: those that are nearest to fitting."""


def settle(job: Job) -> Job:
    """`job` with JSONs that say where all goes, written to OUTPUT/resolved as any others; tells which and why. Collective.

    Raises:
        ConfigError: nothing fits.
    """
    if not any(left_open(job)):
        return job
    swap = swap_folder(job, shipped=True)
    machine = on_its_disk(this_machine(swap), job, swap)
    best = chosen(job, machine, here=True)
    for line in best.lines(machine):
        distributed.log0("%s", line)
    return best.job


def left_open(job: Job) -> tuple[bool, bool]:
    """Whether the student's engine is to be chosen, and the teacher's placement."""
    return job.run.deepspeed_config == AUTO, read_placement(job.teacher_ds).placement == AUTO


def chosen(job: Job, machine: Machine, here: bool = False) -> Choice:
    """The fastest that fits `machine`, of what `job` leaves open.

    Args:
        here: `machine` is this one; what it cannot build, such as NVMe without libaio, is passed over.
    Raises:
        ConfigError: nothing fits; says what came nearest, what is free, and what helps.
    """
    student, teacher = left_open(job)
    every = ranked(job, machine, usual(machine.device_size), student=student, teacher=teacher, here=here)
    if fits := fitting(every, machine):
        return fits[0]
    near = sorted(every, key=lambda c: c.short(machine).over)[:TOLD]
    needs = "; ".join(f"{choice} would need {choice.short(machine)}" for choice in near)
    free = ", ".join(d.supply for d in near[0].demands(machine))
    float32 = ", or a teacher in bfloat16, which takes half" if dtype_name(job.teacher_ds) == "float32" else ""
    raise ConfigError(f"Nothing that could be chosen fits. Free are {free}. Nearest come: {needs}. What helps: a smaller "
                      "student, fewer frames, more GPUs or nodes, more CPU memory, a larger disk for the swap folder"
                      f"{float32}.")  # fmt: skip
