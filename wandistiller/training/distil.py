"""`wandistiller train`: prepare what is missing, distil, draw samples, export; log where everything is."""

import dataclasses
import gc
import shutil
from pathlib import Path

from wandistiller.checkpoint import loading, resume
from wandistiller.checkpoint.manifest import remove_temporaries, rotate
from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.engine.workarounds import destroy_engines, release_module_references
from wandistiller.export.formats.diffusers import DiffusersFormat
from wandistiller.export.source import read_source
from wandistiller.monitoring import environment, memory_usage
from wandistiller.monitoring.memory_usage import within
from wandistiller.planner.disk import log_disk_use
from wandistiller.teacher.base import local_modules, without_guidance
from wandistiller.training.build_student import initial_student
from wandistiller.training.prepare import guided_teacher, prepare
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import write_json
from wandistiller.utils.logging import set_activity

DONE = "DONE"
"""File in the output folder of a finished run, for programs that wait for it."""


def run(job: Job) -> None:
    """Run the command. Collective but for the export, which rank 0 does after the others have ended."""
    machine = environment.collect()
    if collectives.rank() == 0:
        if job.run.resume == "never":
            _set_aside(job.output / "checkpoints")
        remove_temporaries(job.output / "checkpoints")
        (job.output / DONE).unlink(missing_ok=True)
        job.write_resolved()
        write_json(job.output / "resolved" / "machine.json", machine)
    for line in job.summary():
        collectives.log0(line)
    log_disk_use(job)
    job = dataclasses.replace(job, resume_from=resume.latest_valid(job.output, job.run.resume))
    if job.resume_from and job.run.resume == "auto" and collectives.rank() == 0:
        # a run may have been killed between committing and rotating
        rotate(job.resume_from, job.run.keep_checkpoints)
    if _is_complete(job):
        collectives.log0("all %d steps are done; --resume never starts anew", job.run.max_steps)
    else:
        _distil(job)
        gc.collect()  # engines are in reference cycles
    collectives.destroy()
    if collectives.rank() == 0:
        set_activity("exporting the student")
        with within("export"):
            (finished,) = DiffusersFormat().write(read_source(job.output), job.output / "student")
        memory_usage.add(job.output, "export")
        newest = max(job.samples.glob("step_*.png"), default=job.samples)
        files = {"picture": newest, "student": finished, "metrics": job.output / "metrics.jsonl"}
        for name, path in files.items():
            collectives.log0("%-9s %s", name, path)
        write_json(job.output / DONE, {"steps": job.run.max_steps, "student": str(finished)})


@within("load")
def _distil(job: Job) -> None:
    """Prepare, load and train; free all memory afterwards. Collective."""
    data, text, teacher = prepare(job)
    collectives.raise_if_stop_requested("before the first step")
    if job.objective.needs_teacher or job.needs_measuring:
        teacher = teacher or guided_teacher(job, text)
    job, student, critic = initial_student(job, data, teacher)
    collectives.raise_if_stop_requested("before the first step")
    if teacher and not job.objective.needs_teacher:
        release_module_references(local_modules(without_guidance(teacher)).values())
        teacher = None
    Trainer(job, data, text, teacher, student, critic).train()
    for learner in filter(None, (student, critic)):
        destroy_engines(learner.engines.values())
    release_module_references(local_modules(without_guidance(teacher)).values() if teacher else [])


def _is_complete(job: Job) -> bool:
    """Return whether all steps are done and the last samples are drawn. Collective."""
    done, steps = loading.read_state(job.resume_from)["step"] if job.resume_from else 0, job.run.max_steps
    return done > steps or done == steps and collectives.broadcast_object(job.picture(done).is_file())


def _set_aside(checkpoints: Path) -> None:
    """Rename the checkpoints of an earlier run in this folder."""
    if checkpoints.exists():
        number = 1
        while (target := checkpoints.with_name(f"checkpoints.old{number}")).exists():
            number += 1
        shutil.move(checkpoints, target)
        collectives.log0("the earlier run's checkpoints are now in %s", target)
