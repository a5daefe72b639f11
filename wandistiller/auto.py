"""Settles what a run leaves to the machine: the placement `auto` of the teacher."""

import dataclasses
from pathlib import Path

from wandistiller import distributed
from wandistiller.deepspeed_json import dtype_name, teacher_engine
from wandistiller.engines import config_problems
from wandistiller.job import Job
from wandistiller.machine import choose, placed, this_machine
from wandistiller.memory import student_bytes
from wandistiller.placement import BLOCK, read_placement, without_block
from wandistiller.problems import ConfigError


def settle(job: Job) -> Job:
    """`job` with a teacher JSON that says where the teacher goes; tells which and why. Collective.

    Raises:
        ConfigError: the teacher fits nowhere.
    """
    asked = read_placement(job.teacher_ds)
    if asked.placement != "auto":
        return job
    dtype = dtype_name(job.teacher_ds)
    machine = this_machine(Path(placed("zero_inference_nvme", dtype)["zero_optimization"]["offload_param"]["nvme_path"]))
    student = student_bytes(job.student_transformer, len(job.student_experts), job.student_ds, machine.ranks,
                            accelerator=machine.device_free is not None)  # fmt: skip
    choice = choose(job.folder, student, machine, dtype)
    distributed.log0("teacher placement %s", choice.why)
    ds = teacher_engine(choice.name, placed(choice.name, dtype), machine.ranks)
    if problems := config_problems(f"ds_configs/teacher/{choice.name}.json", without_block(ds)):
        raise ConfigError(*problems)
    if asked.guidance_passes != 1:
        ds[BLOCK] = ds.get(BLOCK, {}) | {"guidance_passes": asked.guidance_passes}
    return dataclasses.replace(job, teacher_ds=ds)
