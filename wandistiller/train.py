"""`wandistiller train`: prepare what is missing, distil, draw, export; says at the end where everything is."""

import dataclasses
import gc
import shutil
from pathlib import Path

from torch import nn

from wandistiller import begin, checkpoint, distributed, hardware, resume, usage, wan
from wandistiller.batch import Expert
from wandistiller.blocks import add_projections
from wandistiller.cuts import Cuts
from wandistiller.data import CachedData
from wandistiller.engines import forget, release
from wandistiller.export import export
from wandistiller.files import write_json
from wandistiller.job import Job
from wandistiller.manifest import settle, sweep
from wandistiller.monitors import name_run
from wandistiller.objectives import Teacher
from wandistiller.phase import doing
from wandistiller.prepare import guided_teacher, prepare
from wandistiller.probes import networks, unguided
from wandistiller.start import blank_model, start_model
from wandistiller.student import Student
from wandistiller.trainer import Trainer
from wandistiller.tuning import tune
from wandistiller.usage import within
from wandistiller.written import tell

DONE = "DONE"
"""File in the output folder of a run that has come to its end: what a program that waits for it can rely on."""


def run(job: Job) -> None:
    """The command. Collective until the export, which rank 0 does alone after the others have left."""
    machine = hardware.described()
    if distributed.rank() == 0:
        if job.run.resume == "never":
            _set_aside(job.output / "checkpoints")
        sweep(job.output / "checkpoints")
        (job.output / DONE).unlink(missing_ok=True)
        job.write_resolved()
        write_json(job.output / "resolved" / "machine.json", machine)
    for line in job.summary():
        distributed.log0(line)
    tell(job)
    job = dataclasses.replace(job, resume_from=resume.verified(job.output, job.run.resume))
    if job.resume_from and job.run.resume == "auto" and distributed.rank() == 0:
        settle(job.resume_from, job.run.keep_checkpoints)  # a run may have been killed between publishing it and this
    if _is_complete(job):
        distributed.log0("all %d steps are done; --resume never starts anew", job.run.max_steps)
    else:
        _distil(job)
        gc.collect()  # engines are in circles
    distributed.finish()
    if distributed.rank() == 0:
        doing("exporting the student")
        with within("export"):
            finished = export(job.output, job.output / "student")
        usage.add(job.output, "export")
        newest = max(job.samples.glob("step_*.png"), default=job.samples)
        memory = sorted((job.output / "profile_memory").glob("rank_*.png"))[:1] if job.run.profile_memory else []
        for what, where in (("picture", newest), ("student", finished), ("metrics", job.output / "metrics.jsonl"),
                            *(("memory", file) for file in memory)):  # fmt: skip
            distributed.log0("%-9s %s", what, where)
        write_json(job.output / DONE, {"steps": job.run.max_steps, "student": str(finished)})


@within("load")
def _distil(job: Job) -> None:
    """Prepare, load and train; nothing of it is held afterwards. Collective."""
    data, text, teacher = prepare(job)
    distributed.stop_if_asked("before the first step")
    if job.objective.needs_teacher or begin.needs_measuring(job):
        teacher = teacher or guided_teacher(job, text)
    job, student = _started(job, data, teacher)
    distributed.stop_if_asked("before the first step")
    if teacher and not job.objective.needs_teacher:
        forget(networks(unguided(teacher)).values())
        teacher = None
    Trainer(job, data, text, teacher, student).train()
    release(student.engines.values())
    forget(networks(unguided(teacher)).values() if teacher else [])


def _is_complete(job: Job) -> bool:
    """Whether all steps are done, and the last is drawn. Collective."""
    done = checkpoint.read_state(job.resume_from)["step"] if job.resume_from else 0
    return done > job.run.max_steps or done == job.run.max_steps and distributed.from_rank_0(job.picture(done).is_file())


def _started(job: Job, data: CachedData, teacher: Teacher | None) -> tuple[Job, Student]:
    """The student, at its start or where a checkpoint's weights will go, and the run with all chosen. Collective."""
    if job.resume_from:
        return job, build_student(job)
    job, cuts = begin.choose(job, data, teacher) if begin.needs_measuring(job) else (job, {})
    begin.write_lineage(job, cuts)
    student = build_student(job, cuts)
    if teacher:
        begin.report(job, data, teacher, student)
    return job, student


def build_student(job: Job, cuts: dict[Expert, Cuts] | None = None) -> Student:
    """The student in its engines: at its start, or blank where a checkpoint gives the weights. Collective.

    Args:
        cuts: how each network is cut from the teacher, if it is narrower.
    """
    doing("building the student")
    models = student_models(job, cuts)
    checkpoint.keep_frozen(models, job.output, job.resume_from)
    return in_engines(job, models)


def student_models(job: Job, cuts: dict[Expert, Cuts] | None = None) -> dict[Expert, nn.Module]:
    """The student's networks, before engines have them; what a checkpoint trains is blank, what it froze is there."""
    config = job.student_transformer
    models = {
        expert: blank_model(config) if job.resume_from else
        start_model(job.student, config, job.folder, expert, job.run.seed, (cuts or {}).get(expert))
        for expert in job.student_experts
    }  # fmt: skip
    for expert, model in models.items():
        tune(model, job.run.frozen, job.run.lora, job.run.seed)
        if term := job.objectives[expert].feature_term:
            add_projections(model, term.blocks, wan.width(job.folder.config))
    if job.resume_from:
        checkpoint.load_frozen(models, job.resume_from)
    return models


def in_engines(job: Job, models: dict[Expert, nn.Module]) -> Student:
    """The networks as the student that learns. Collective."""
    name_run(job.output, job.student_ds, goes_on=job.resume_from is not None)
    return Student(models, job.student_ds, learning_rates=job.run.learning_rates, ema=job.run.ema,
                   ema_start=job.run.ema_start)  # fmt: skip


def _set_aside(checkpoints: Path) -> None:
    """Keep the checkpoints of an earlier run in this folder, under another name."""
    if checkpoints.exists():
        number = 1
        while (target := checkpoints.with_name(f"checkpoints.old{number}")).exists():
            number += 1
        shutil.move(checkpoints, target)
        distributed.log0("the earlier run's checkpoints are now in %s", target)
