"""Settles what a run leaves to the machine: a student's engine or a teacher's placement that is `auto`."""

from pathlib import Path

from wandistiller import distributed
from wandistiller.config import AUTO, read_json
from wandistiller.deepspeed_json import dtype_name
from wandistiller.engines import config_problems
from wandistiller.job import Job
from wandistiller.machine import Machine, this_machine
from wandistiller.placement import read_placement, without_block
from wandistiller.problems import ConfigError
from wandistiller.rates import usual
from wandistiller.recommend import Choice, fitting, ranked

TOLD = 3
"""Combinations that a refusal tells of: those that are nearest to fitting."""


def settle(job: Job) -> Job:
    """`job` with JSONs that say where all goes, written to OUTPUT/resolved as any others; tells which and why. Collective.

    Raises:
        ConfigError: nothing fits.
    """
    if not any(left_open(job)):
        return job
    nvme = read_json("ds_configs/teacher/zero_inference_nvme.json")["zero_optimization"]["offload_param"]["nvme_path"]
    machine = this_machine(Path(nvme))
    best = chosen(job, machine)
    distributed.log0("chosen    %s", best)
    distributed.log0("          %s", best.why(machine))
    files = {"student": best.job.student_ds, "teacher": best.job.teacher_ds}
    found = [p for name, ds in files.items() for p in config_problems(f"the {name}'s engine chosen", without_block(ds))]
    if found:
        raise ConfigError(*found)
    return best.job


def left_open(job: Job) -> tuple[bool, bool]:
    """Whether the student's engine is to be chosen, and the teacher's placement."""
    return job.run.deepspeed_config == AUTO, read_placement(job.teacher_ds).placement == AUTO


def chosen(job: Job, machine: Machine) -> Choice:
    """The fastest that fits `machine`, of what `job` leaves open.

    Raises:
        ConfigError: nothing fits; says what came nearest, what is free, and what helps.
    """
    student, teacher = left_open(job)
    every = ranked(job, machine, usual(machine.device_free), student=student, teacher=teacher)
    if fits := fitting(every, machine):
        return fits[0]
    near = sorted(every, key=lambda c: c.short(machine).over)[:TOLD]
    needs = "; ".join(f"{choice} would need {choice.short(machine)}" for choice in near)
    free = ", ".join(d.supply for d in near[0].demands(machine))
    float32 = ", or a teacher in bfloat16, which takes half" if dtype_name(job.teacher_ds) == "float32" else ""
    raise ConfigError(f"Nothing that could be chosen fits. Free are {free}. Nearest come: {needs}. What helps: a smaller "
                      "student, fewer frames, more GPUs or nodes, more CPU memory, a larger disk for the swap folder"
                      f"{float32}.")  # fmt: skip
