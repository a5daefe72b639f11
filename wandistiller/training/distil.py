"""`wandistiller train`: prepare what is missing, distil, draw samples, export; log where everything is."""

import dataclasses
import gc
import shlex
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

from wandistiller.batch import STUDENT
from wandistiller.checkpoint import loading, resume
from wandistiller.checkpoint.manifest import remove_temporaries, rotate
from wandistiller.config.job import Job
from wandistiller.config.stages import whole_output, write_resolved
from wandistiller.config.start import DONE, read_start
from wandistiller.config.summary import precision_lines, summary
from wandistiller.distributed import collectives
from wandistiller.engine import extensions
from wandistiller.engine.workarounds import destroy_engines, release_module_references
from wandistiller.export.formats.diffusers import DiffusersFormat
from wandistiller.export.formats.lora import LoraFormat, loading_lines
from wandistiller.export.output import per_expert, replaced
from wandistiller.export.source import read_source
from wandistiller.flow import EULER, FLOW_MAP
from wandistiller.monitoring import environment, memory_usage
from wandistiller.monitoring.memory_usage import within
from wandistiller.teacher.base import local_modules
from wandistiller.training.build_student import initial_learners
from wandistiller.training.prepare import guided_teacher, prepare, ranks_of
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import TINY, link_or_copy, write_json
from wandistiller.utils.logging import set_activity

LORA = "lora.safetensors"
"""File of a finished run's adapters, for ComfyUI (but a flow map's) and diffusers; one for each expert."""


def run(stages: list[Job], begin: Callable[[Job], None]) -> None:
    """Run the command. Collective but for the exports, which rank 0 does after the others have ended.

    Args:
        stages: a recipe's runs; each but the first starts from the student of the one before.
    """
    machine, output = environment.collect(), whole_output(stages)
    if collectives.rank() == 0:
        for folder in {output, *(job.output for job in stages if not job.is_spent)}:
            (folder / DONE).unlink(missing_ok=True)
        if (source := stages[0].run.resume) != "auto":
            collectives.log0("resume    %s is for this start alone; after it, give --resume auto", source)
        for job in stages if source == "never" else ():
            _set_aside(job.output / "checkpoints")
        write_resolved(stages)
        write_json(output / "resolved" / "machine.json", machine)
    for before, job in zip([None, *stages], stages, strict=False):
        begin(job)
        if job.is_spent:
            collectives.log0("stage     %s is done, and the next one has begun", job.stage)
            continue
        if before and not before.is_spent:  # by one rank: others may not see the newest checkpoint yet
            start = collectives.broadcast_object(read_start(str(job.start.folder)))
            job = dataclasses.replace(job, start=start)
        _run_stage(job)
        gc.collect()  # engines are in reference cycles
    collectives.destroy()
    if collectives.rank() == 0:
        for job in stages:
            if not job.is_spent:
                _export(job)
        last = stages[-1]
        if last.output != output:
            _take_over(stages, output)
        if last.networks.bases:
            _log_adapters(last, output)
        _log_next(last, output)


def _take_over(stages: list[Job], output: Path) -> None:
    """Give a recipe's output folder what its last stage has made."""
    last = stages[-1]
    if not last.networks.is_teacher_with_adapters(last.folder):
        with replaced(output / "student") as folder:
            shutil.rmtree(folder)
            link_or_copy(last.output / "student", folder)
        collectives.log0("%-9s %s", "student", output / "student")
    if last.networks.bases:
        LoraFormat().write(read_source(last.output), output / LORA)
    made = output if last.networks.is_teacher_with_adapters(last.folder) else output / "student"
    write_json(output / DONE, {"stages": [job.stage for job in stages], "student": str(made)})


def _log_next(job: Job, output: Path) -> None:
    """Log the commands that compare a student with its teacher, and that merge a LoRA."""
    data = f"{job.data}:held_out" if job.data in TINY else job.data
    is_lora = job.networks.is_teacher_with_adapters(job.folder)
    student = output if is_lora else output / "student"
    words = ["wandistiller", "evaluate", "--student_path", str(student), "--prompts", data]
    if is_lora and job.data not in TINY:  # of 64 prompts the teacher's steps may take longer than the run
        words += ["--num_prompts", "16", "--quick"]
    if (few := job.schedule.few) and few.sampler != EULER:  # else it is trained for one number
        others = (8, 16) if few.sampler == FLOW_MAP else ()
        words += ["--steps", *map(str, sorted({1, 2, len(few.sigmas), *others}))]
    collectives.log0("%-9s %s", "next", shlex.join(words))
    if is_lora:
        merge = ["wandistiller", "export", "--checkpoint", str(job.output), "--output", "students/mine"]
        collectives.log0("%-9s %s  # a pipeline with the LoRA in it", "or", shlex.join(merge))


def _run_stage(job: Job) -> None:
    """Train one run to its end, from its last checkpoint. Collective."""
    if collectives.rank() == 0:
        remove_temporaries(job.output / "checkpoints")
    for line in [*summary(job), *precision_lines(job)]:
        collectives.log0(line)
    job = dataclasses.replace(job, resume_from=resume.latest_valid(job.output, job.run.resume))
    if job.resume_from and collectives.rank() == 0:
        if job.run.resume == "auto":  # a run may have been killed between committing and rotating
            rotate(job.resume_from, job.run.keep_checkpoints)
        else:  # now: if it is stopped before it has begun, `auto` goes on from this one too
            resume.set_newer_aside(job.output, job.resume_from)
    if _is_complete(job):
        collectives.log0("all %d steps are done; `--resume never` begins from step 0", job.run.max_steps)
    else:
        _distil(job)


def _export(job: Job) -> None:
    """Export the student of a finished run on rank 0: a pipeline, and adapters; the whole teacher's alone."""
    set_activity("exporting the student")
    student = job.output if job.networks.is_teacher_with_adapters(job.folder) else job.output / "student"
    with within("export"):
        if job.networks.bases:
            LoraFormat().write(read_source(job.output), job.output / LORA)
        if not job.networks.is_teacher_with_adapters(job.folder):
            DiffusersFormat().write(read_source(job.output), student)
    memory_usage.add(job.output, "export")
    newest = max(job.samples.glob("step_*.png"), default=job.samples)
    made = {"picture": newest, "student": student, "metrics": job.output / "metrics.jsonl"}
    for name, path in made.items():
        collectives.log0("%-9s %s", name, path)
    write_json(job.output / DONE, {"steps": job.run.max_steps, "student": str(student)})


def _log_adapters(job: Job, output: Path) -> None:
    """Log how the LoRA of a finished run, in a folder, is loaded."""
    experts = [expert.value for expert in job.networks.student]
    files = [per_expert(output / LORA, experts, expert.value) for expert in job.networks.bases]
    for file in files:
        collectives.log0("%-9s %s", "lora", file)
    lines = loading_lines([f'"{file}"' for file in files], [*job.networks.bases.values()])
    for line in lines if not job.student_transformer.has_second_time else ():
        collectives.log0("%-9s %s", "", line)
    card = output / "lora.card" / "README.md"
    collectives.log0("%-9s %s (ComfyUI's nodes, and lines for diffusers)", "card", card)


@within("load")
def _distil(job: Job) -> None:
    """Prepare, load and train; free all memory afterwards. Collective."""
    with collectives.raise_on_all_ranks():
        extensions.build("deepspeed_config", job.student_engine)
        extensions.build("teacher_deepspeed_config", job.teacher.engine)
    ranks = ranks_of(job)
    data, conditions, teacher = prepare(job, ranks)
    collectives.raise_if_stop_requested("before the first step")
    if job.objective.needs_teacher or job.needs_measuring or job.networks.bases:
        teacher = teacher or guided_teacher(job, conditions, ranks)
    job, learners = initial_learners(job, data, teacher, ranks)
    collectives.raise_if_stop_requested("before the first step")
    if teacher and not job.objective.needs_teacher:
        release_module_references(local_modules(teacher))
        teacher = None
    Trainer(job, data, conditions, teacher, learners).train()
    learners[STUDENT].monitors.close()
    for learner in learners.values():
        destroy_engines(learner.engines.values())
    release_module_references(local_modules(teacher) if teacher else [])


def _is_complete(job: Job) -> bool:
    """Return whether all steps are done and the last samples are drawn. Collective."""
    done, steps = loading.read_state(job.resume_from)["step"] if job.resume_from else 0, job.run.max_steps
    return done > steps or done == steps and collectives.broadcast_object(job.picture(done).is_file())


def _set_aside(checkpoints: Path) -> None:
    """Rename the checkpoints of an earlier run in this folder."""
    if checkpoints.exists():
        names = (checkpoints.with_name(f"checkpoints.old{number}") for number in count(1))
        target = next(name for name in names if not name.exists())
        shutil.move(checkpoints, target)
        collectives.log0("the earlier run's checkpoints are now in %s", target)
