"""`wandistiller train`: prepare what is missing, distil, draw, export; says at the end where everything is."""

import shutil
from pathlib import Path

from wandistiller import checkpoint, distributed
from wandistiller.export import export
from wandistiller.job import Job
from wandistiller.prepare import guided_teacher, prepare
from wandistiller.start import start_model
from wandistiller.student import Student
from wandistiller.trainer import Trainer


def run(job: Job) -> None:
    """The command. Collective until the export, which rank 0 does alone after the others have left."""
    if distributed.rank() == 0:
        if job.run.resume == "never":
            _set_aside(job.output / "checkpoints")
        job.write_resolved()
    for line in job.summary():
        distributed.log0(line)
    if job.resume_from and checkpoint.read_state(job.resume_from)["step"] >= job.run.max_steps:
        distributed.log0("all %d steps are done; --resume never starts anew", job.run.max_steps)
    else:
        data, text, teacher = prepare(job)
        teacher = teacher or guided_teacher(job, text)
        Trainer(job, data, text, teacher, build_student(job)).train()
    distributed.finish()
    if distributed.rank() == 0:
        finished = export(job.output, job.output / "student")
        newest = max((job.output / "samples").glob("step_*.png"))
        for what, where in (("picture", newest), ("student", finished), ("metrics", job.output / "metrics.jsonl")):
            distributed.log0("%-9s %s", what, where)


def build_student(job: Job) -> Student:
    """The student at its start, in its engines. Collective."""
    models = {
        expert: start_model(job.student, job.student_transformer, job.folder, expert, job.run.seed)
        for expert in job.student_experts
    }
    return Student(models, job.student_ds)


def _set_aside(checkpoints: Path) -> None:
    """Keep the checkpoints of an earlier run in this folder, under another name."""
    if checkpoints.exists():
        number = 1
        while (target := checkpoints.with_name(f"checkpoints.old{number}")).exists():
            number += 1
        shutil.move(checkpoints, target)
        distributed.log0("the earlier run's checkpoints are now in %s", target)
