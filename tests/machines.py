"""Machines and published Wans, and for each pair the fastest of the shipped JSONs that fit."""

from pathlib import Path
from typing import Any

from planned import published_job
from published_wan import write_published
from ranks import ROOT
from recipes import PROMPTS

from wandistiller.config import read_json
from wandistiller.machine import GIB, Machine
from wandistiller.rates import usual
from wandistiller.recommend import Choice, fitting, ranked
from wandistiller.written import on_its_disk

TEACHERS = {"wan2.1_1.3b": "Wan2.1-T2V-1.3B", "wan2.2_5b": "Wan2.2-TI2V-5B", "wan2.1_14b": "Wan2.1-T2V-14B",
            "wan2.2_a14b": "Wan2.2-T2V-A14B"}  # fmt: skip
FOLDER = ROOT / "ds_configs" / "machines"
TOTAL = 64
"""Samples of a step, the same on all machines, so that they learn the same."""


def gpus(count: int, each: int, host: int, nodes: int = 1) -> Machine:
    """Machines as they are sold: GiB of a GPU, and of a node's CPU memory; 2 TB of disk."""
    return Machine(each * GIB, host * GIB, 1800 * GIB, count * nodes, count)


def cpu(host: int) -> Machine:
    return Machine(None, host * GIB, 1800 * GIB, 1, 1)


MACHINES = {
    "cpu16": cpu(16), "cpu64": cpu(64), "cpu256": cpu(256),
    "1x24": gpus(1, 24, 128), "2x24": gpus(2, 24, 128), "4x24": gpus(4, 24, 256),
    "1x48": gpus(1, 48, 128), "2x48": gpus(2, 48, 256), "4x40": gpus(4, 40, 512),
    "1x80": gpus(1, 80, 256), "4x80": gpus(4, 80, 1000), "8x80": gpus(8, 80, 2000), "2x8x80": gpus(8, 80, 2000, nodes=2),
}  # fmt: skip


def write_wans(folder: Path) -> Path:
    """`folder` with the published pipelines' JSON files, and prompts, for the planner to read."""
    (folder / "prompts.txt").write_text(PROMPTS)
    for wan in TEACHERS.values():
        write_published(folder, f"Wan-AI/{wan}-Diffusers")
    return folder


def best(folder: Path, teacher: str, machine: Machine) -> tuple[Choice, bool]:
    """The fastest that fits `machine`, and True; if nothing does, what comes nearest."""
    batch = {"train_batch_size": TOTAL, "train_micro_batch_size_per_gpu": 1}
    student = {k: v for k, v in read_json("ds_configs/student/zero2_offload.json").items() if k != "gradient_accumulation_steps"}
    job = published_job(folder, machine, TEACHERS[teacher], deepspeed_config=student | batch)
    machine = on_its_disk(machine, job, None)
    every = ranked(job, machine, usual(machine.device_free))
    fits = fitting(every, machine)
    return (fits[0], True) if fits else (min(every, key=lambda choice: choice.short(machine).over), False)


def recipe(name: str, teacher: str, choice: Choice) -> dict[str, Any]:
    """What is shipped."""
    run = {"teacher_path": f"Wan-AI/{TEACHERS[teacher]}-Diffusers", "data_path": "prompts.txt",
           "output_dir": f"runs/{name}_{teacher}", "student_config": "ds_configs/students/half.json"}  # fmt: skip
    return run | choice.settings


HEAD = "| recipe | student's JSON, teacher's | micro-batch | GiB a GPU | CPU memory of a node | disk | s a step, at least |"


def row(name: str, teacher: str, choice: Choice, fits: bool) -> str:
    """A line of the table."""
    taken = {d.where: f"{d.need / GIB:.1f}" for d in choice.demands(MACHINES[name])}
    numbers = " | ".join(taken.get(where, "") for where in ("on each GPU", "of CPU memory", "of disk"))
    if not fits:
        return f"| {name}_{teacher}: none fits | nearest: {choice.student}, {choice.teacher} | | {numbers} | |"
    jsons = f"{choice.student}, {choice.teacher} | {choice.job.batch.micro}"
    return f"| {name}_{teacher} | {jsons} | {numbers} | {choice.seconds:.3g} |"
