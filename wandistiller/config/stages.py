"""Stages of a recipe, checked: runs that follow each other, each from the student of the one before."""

import dataclasses
import os
from collections.abc import Collection
from contextlib import suppress
from operator import eq
from pathlib import Path

from wandistiller.batch import PATH
from wandistiller.checkpoint import manifest
from wandistiller.checkpoint.loading import read_state
from wandistiller.config import identity
from wandistiller.config.job import Job
from wandistiller.config.recipe import ENGINE, TEACHER, Recipe, in_stages
from wandistiller.config.run_config import AUTO, RunConfig
from wandistiller.config.stage_order import order_problems
from wandistiller.config.start import DONE, recorded_stages
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.objectives.objective import read_objective
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError, Problem
from wandistiller.utils.files import read_json, write_json


def read_jobs(recipe: Recipe, world: int, *, here: bool = True, emulated: bool | None = None) -> list[Job]:
    """Check all runs of a recipe before any weight is read; each but the first starts after the one before.

    Args:
        here: check them against this machine too.
        emulated: whether the CPU that computes emulates bf16; None leaves every precision as it is.

    Raises:
        ConfigError: with every problem found.
    """
    jobs: list[Job] = []
    problems: dict[Problem, str] = {}
    runs = recipe.runs
    first, *_ = runs.values()
    how = {"here": here, "keeps_path": any(map(_follows_path, runs.values()))}
    for stage, run in runs.items():
        run = run if emulated is None else _in_open_precision(run, recipe.origins[stage], emulated)
        if problems:  # the student before is not known; that of the first stage has the same networks
            run = dataclasses.replace(run, student_config=first.student_config, resume="never")
        how |= {"previous": jobs[-1] if jobs and not problems else None, "origins": recipe.origins[stage]}
        try:
            jobs.append(dataclasses.replace(read_job(run, world, **how), stage=stage))
        except ConfigError as error:
            problems |= {p: stage for p in error.problems if p not in problems}
    if other := _other_stages_problem([*runs], Path(first.output_dir)):
        problems[other] = ""
    if not problems:
        jobs = with_spent(jobs)
        problems = order_problems(jobs) | {p: job.stage for job in jobs if (p := _gone_problem(job))}
    if problems:
        placed = {p.placed(recipe.origins.get(s, {}), recipe.where): s for p, s in problems.items()}
        raise ConfigError(*(p.in_stage(stage) if stage else p for p, stage in placed.items()))
    return jobs


def _in_open_precision(run: RunConfig, chosen: Collection[str], emulated: bool) -> RunConfig:
    """Return the run with float32 for each engine whose precision the user left open, if bf16 is emulated.

    A run that has begun keeps its precision, wherever it goes on. `chosen` are the user's settings.
    """
    is_named = TEACHER in chosen and run.teacher_deepspeed_config not in [*strategies()]
    rows = [("student", "mixed_precision", "no", ENGINE in chosen and run.deepspeed_config != AUTO)]
    for engine, setting, float32, is_chosen in [*rows, ("teacher", "teacher_dtype", "float32", is_named)]:
        if is_chosen or getattr(run, setting) is not None:
            continue
        begun, is_float32 = f"{run.output_dir}/resolved/{engine}_deepspeed.json", emulated
        # not Path.is_file, which raises OSError of a long name (Python 3.11)
        if run.resume != "never" and os.path.isfile(begun):
            is_float32 = DeepSpeedJson(begun, read_json(begun)).precision == "float32"
        run = dataclasses.replace(run, **{setting: float32}) if is_float32 else run
    return run


def _follows_path(run: RunConfig) -> bool:
    """Return whether a run's objective needs the states of the teacher's sampling path."""
    with suppress(ConfigError):  # reported when the run is checked
        return PATH in read_objective(run.objective).kinds
    return False


def with_spent(jobs: list[Job]) -> list[Job]:
    """Mark the stages whose end is no longer needed, because the next one has begun, and no longer there."""
    marked: list[Job] = []
    for job in reversed(jobs):
        after = marked[-1] if marked else None
        begun = after and (after.resume_from or after.is_spent)
        whole = job.resume_from and read_state(job.resume_from)["step"] >= job.run.max_steps
        marked.append(dataclasses.replace(job, is_spent=bool(begun and not whole)))
    return marked[::-1]


def _gone_problem(job: Job) -> Problem | None:
    """Return the problem of a finished run without checkpoints, which would be trained again in silence."""
    if job.is_spent or job.resume_from or job.run.resume == "never" or not (job.output / DONE).is_file():
        return None
    student = job.output / "student"
    text = f"this run is done (the file {DONE}), and its checkpoints are gone. Put them back, give another "
    text += "--output_dir, or train it again by --resume never."
    if student.is_dir():
        text += f' Its student is in {student}; the student_config {{"init": "{student}"}} starts from that.'
    return Problem(text, job.output)


def _other_stages_problem(stages: list[str], output: Path) -> Problem | None:
    """Return the problem of the output folder of other stages, whose student would be replaced.

    Args:
        stages: [""] of a recipe without any.
        output: of the first one.
    """
    output = output.parent if stages[0] else output
    names = [f"{number}_{stage}" for number, stage in enumerate(stages, 1) if stage]
    ran = [folder.name for folder in recorded_stages(output) if folder.is_dir()]
    is_other = bool(ran) or bool(names and manifest.steps(output / "checkpoints"))
    if not is_other or ran and names and all(map(eq, ran, names)):
        return None
    what = f"the stages {', '.join(ran)}" if ran else "a recipe without stages"
    text = f"`output_dir` is {output}, where {what} ran; now {', '.join(names) or 'there are none'}."
    return Problem(f"{text} Give another --output_dir, or the earlier names and order of stages.")


def whole_output(stages: list[Job]) -> Path:
    """Return the output folder of a recipe: that of its run, or the one around those of its stages."""
    return stages[0].output.parent if stages[0].stage else stages[0].output


def write_resolved(stages: list[Job]) -> None:
    """Write a recipe's settings as they run to OUTPUT/resolved; of stages also OUTPUT/N_NAME/resolved."""
    for job in stages:
        identity.write_resolved(job)
    if stages[0].stage:
        output, pictures = whole_output(stages), stages[0].run.sample_dir
        folders = {"output_dir": str(output)}
        folders |= {"sample_dir": str(Path(pictures).parent)} if pictures else {}
        runs = {job.stage: identity.settings_as_run(job) for job in stages}
        write_json(output / "resolved" / "run.json", in_stages(runs, folders))
