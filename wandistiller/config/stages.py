"""Stages of a recipe: runs that follow each other, each from the student of the one before."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wandistiller.batch import PATH
from wandistiller.checkpoint import manifest
from wandistiller.checkpoint.loading import read_state
from wandistiller.config import identity
from wandistiller.config.aliases import TEACHER, without_aliases
from wandistiller.config.job import Job
from wandistiller.config.run_config import EITHER, RunConfig
from wandistiller.config.shorthands import merged
from wandistiller.config.stage_order import order_problems
from wandistiller.config.start import DONE, recorded_stages
from wandistiller.config.validate import read_job
from wandistiller.objectives.registry import read_objective
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import RECIPE, ConfigError, Problem, problem
from wandistiller.utils.files import read_json, write_json

STAGES, NAME = "stages", "name"
OF_ALL = (
    *("output_dir", "cache_dir", "sample_dir"),
    *("resume", "log_level", "timeout"),
)
"""Settings that hold for the whole recipe."""
FITTING_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}")


def read_runs(
    recipe: str | None, flags: dict[str, Any], emulated: bool | None = None
) -> dict[str, RunConfig]:
    """Read a recipe's file and merge the flags; see `runs_of`."""
    return runs_of(read_json(recipe) if recipe else {}, flags, recipe, emulated)


def runs_of(
    values: dict[str, Any],
    flags: dict[str, Any],
    recipe: str | None,
    emulated: bool | None = None,
) -> dict[str, RunConfig]:
    """Return the run of a recipe, or the runs of its stages by name, in order; flags win over both.

    A stage's own keys replace the recipe's others. It writes to OUTPUT/1_NAME, and all use one cache.

    Args:
        emulated: as in `merged`.

    Raises:
        ConfigError: with all problems of all stages; those that all have are reported once.
    """
    if STAGES not in values:
        return {"": merged(values, flags, recipe, emulated)}
    where, values, flags = recipe or "recipe", dict(values), dict(flags)
    stages = values.pop(STAGES)
    if problems := _stage_problems(where, stages, values | flags):
        raise ConfigError(*problems)
    values, problems = without_aliases(where, values)
    read = [without_aliases(f"{where}, stage {stage[NAME]}", stage) for stage in stages]
    if problems := problems + [text for _, wrong in read for text in wrong]:
        raise ConfigError(*problems)
    stages = [stage for stage, _ in read]
    values |= {key: flags.pop(key) for key in ("output_dir", "cache_dir", "sample_dir") if key in flags}
    runs, found, folder = {}, [], ""
    for number, stage in enumerate(stages, 1):
        place = f"{where}, stage {stage[NAME]}"
        own = _with_places(_laid_over(values, stage), f"{number}_{stage[NAME]}")
        given = flags
        if number > 1:
            own["student_config"] = {"init": folder}
            given = {key: value for key, value in flags.items() if key != "student_config"}
        folder = str(own.get("output_dir"))
        try:
            runs[stage[NAME]] = merged(own, given, place, emulated)
        except ConfigError as error:
            found.append({p.at(p.where.replace(place, where)): p for p in error.problems})
    if found:
        raise ConfigError(*_once(found, len(stages)))
    return runs


@contextmanager
def placing(recipe: str | None, flags: Iterable[str]) -> Iterator[None]:
    """Name the recipe's file, or the command line, in messages about settings of a run."""

    def placed(problem: Problem) -> Problem:
        if problem.where != RECIPE:
            return problem
        setting = re.match(r"\w*", problem.key)[0]
        return problem.at(recipe if recipe and setting not in flags else "command line")

    try:
        yield
    except ConfigError as error:
        raise ConfigError(*map(placed, error.problems)) from None


def _stage_problems(where: str, stages: Any, given: dict[str, Any]) -> list[str]:
    """List what is wrong with the list of stages, apart from the settings in it.

    Args:
        given: the recipe's other values, and the flags.
    """
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        return [problem(where, STAGES, stages, 'Write a list of objects, each with a "name".')]
    problems, names = [], [stage.get(NAME) for stage in stages]
    for number, name in enumerate(names, 1):
        if not isinstance(name, str) or not FITTING_NAME.fullmatch(name):
            remedy = "Write a name of letters, digits, - and _, which its folder gets."
            problems.append(problem(where, f"{STAGES}, {number}: {NAME}", name, remedy))
        elif names.index(name) < number - 1:
            problems.append(
                problem(where, f"{STAGES}, {number}: {NAME}", name, "Another has it. Write another.")
            )
    for number, stage in enumerate(stages, 1):
        for key in (key for key in OF_ALL if key in stage):
            remedy = "It holds for all stages. Write it outside of `stages`."
            problems.append(problem(where, f"{STAGES}, {number}: {key}", stage[key], remedy))
        if number > 1 and "student_config" in stage:
            remedy = "A stage trains the student of the stage before; only the first one has this key."
            problems.append(
                problem(where, f"{STAGES}, {number}: student_config", stage["student_config"], remedy)
            )
    if (resume := given.get("resume", "auto")) not in ("auto", "never"):
        remedy = "Stages have checkpoints of their own. Write auto or never."
        problems.append(problem(where, "resume", resume, remedy))
    return problems


def _laid_over(values: dict[str, Any], stage: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's values with the stage's own in place of those that mean the same."""
    replaced = {key for group in EITHER if stage.keys() & set(group) for key in group}
    if stage.get(TEACHER) not in (None, *strategies()):
        replaced.add("teacher_dtype")  # the precision is in that JSON
    return {k: v for k, v in values.items() if k not in replaced} | {
        k: v for k, v in stage.items() if k != NAME
    }


def _with_places(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Give the stage folders of its own, and all stages one cache."""
    output, pictures = values.get("output_dir"), values.get("sample_dir")
    if isinstance(output, str) and output:
        values["output_dir"] = str(Path(output) / name)
        if values.get("cache_dir") is None:
            values["cache_dir"] = str(Path(output) / "cache")
    if isinstance(pictures, str) and pictures:
        values["sample_dir"] = str(Path(pictures) / name)
    return values


def _once(found: list[dict[Problem, Problem]], stages: int) -> list[Problem]:
    """Return the problems of all stages; those that every stage has, once and without a stage's name.

    Args:
        found: of each stage, by the same without its name.
    """
    common = [
        general for general in found[0] if len(found) == stages and all(general in one for one in found)
    ]
    own = [problem for one in found for general, problem in one.items() if general not in common]
    return list(dict.fromkeys([*common, *own]))


def read_jobs(runs: dict[str, RunConfig], world: int, *, here: bool = True) -> list[Job]:
    """Check all runs of a recipe before any weight is read; each but the first starts after the one before.

    Args:
        here: check them against this machine too.

    Raises:
        ConfigError: with every problem found.
    """
    jobs: list[Job] = []
    problems: dict[Problem, str] = {}
    first, *_ = runs.values()
    how = {"here": here, "keeps_path": any(map(_follows_path, runs.values()))}
    for stage, run in runs.items():
        if problems:  # the student before is not known; that of the first stage has the same networks
            run = dataclasses.replace(run, student_config=first.student_config, resume="never")
        previous = jobs[-1] if jobs and not problems else None
        try:
            jobs.append(dataclasses.replace(read_job(run, world, previous=previous, **how), stage=stage))
        except ConfigError as error:
            problems |= {text: stage for text in error.problems if text not in problems}
    for text in places_problems(runs):
        problems.setdefault(text, "")
    if not problems:
        jobs = with_spent(jobs)
        problems = order_problems(jobs) | {text: job.stage for job in jobs if (text := _gone_problem(job))}
    if problems:
        raise ConfigError(*(p.in_stage(stage) if stage else p for p, stage in problems.items()))
    return jobs


def _follows_path(run: RunConfig) -> bool:
    """Return whether a run's objective needs the states of the teacher's sampling path."""
    try:
        return PATH in read_objective(run.objective).kinds
    except ConfigError:
        return False  # reported when the run is checked


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
    kept = (
        f' Its student is in {student}; a run starts from that by the student_config {{"init": "{student}"}}.'
    )
    text = f"this run is done (the file {DONE}), and its checkpoints are gone. Put them back, give another "
    text += f"--output_dir, or train it again by --resume never.{kept if student.is_dir() else ''}"
    return Problem(text, job.output)


def places_problems(runs: dict[str, RunConfig]) -> list[str]:
    """List why the output folder is that of a run in other stages, whose student would be replaced."""
    names, (first, *_) = list(runs), runs.values()
    output = Path(first.output_dir).parent if names[0] else Path(first.output_dir)
    begun = [folder for folder in recorded_stages(output) if folder.is_dir()]
    remedy = "Give another --output_dir"
    if begun and not names[0]:
        listed = ", ".join(folder.name for folder in begun)
        return [f"`output_dir` is {output}, where a recipe in stages ran ({listed}). {remedy}."]
    if names[0] and manifest.steps(output / "checkpoints"):
        return [f"`output_dir` is {output}, where a recipe without stages ran. {remedy}."]
    own = [f"{number}_{name}" for number, name in enumerate(runs, 1)]
    other = [folder.name for folder, name in zip(begun, own, strict=False) if folder.name != name]
    if names[0] and other:
        what = f"where the stages {', '.join(folder.name for folder in begun)} ran; now {', '.join(own)}"
        return [f"`output_dir` is {output}, {what}. {remedy}, or the earlier names and order."]
    return []


def whole_output(stages: list[Job]) -> Path:
    """Return the output folder of a recipe: that of its run, or the one around those of its stages."""
    return stages[0].output.parent if stages[0].stage else stages[0].output


def write_resolved(stages: list[Job]) -> None:
    """Write a recipe's settings as they run to OUTPUT/resolved; of stages also OUTPUT/N_NAME/resolved."""
    for job in stages:
        identity.write_resolved(job)
    if not stages[0].stage:
        return
    output = whole_output(stages)
    given = {job.stage: identity.resolved(job) for job in stages}
    pictures = stages[0].run.sample_dir
    places = {"output_dir": str(output)} | ({"sample_dir": str(Path(pictures).parent)} if pictures else {})
    write_json(output / "resolved" / "run.json", in_stages(given, places))


def in_stages(runs: dict[str, dict[str, Any]], places: dict[str, Any]) -> dict[str, Any]:
    """Return one recipe of the recipes of its stages, by name; settings that all have stand outside."""
    first, *_ = runs.values()
    folders = {key: places[key] for key in ("output_dir", "cache_dir", "sample_dir") if key in places}
    alike = {key for key in first if all(values.get(key) == first[key] for values in runs.values())}
    shared = {key: value for key, value in first.items() if key in alike} | folders
    stages = [
        {NAME: name} | {k: v for k, v in values.items() if k not in {*alike, *OF_ALL}}
        for name, values in runs.items()
    ]
    for stage in stages[1:]:  # the student of the stage before
        stage.pop("student_config", None)
    return shared | {STAGES: stages}
