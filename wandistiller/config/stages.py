"""Stages of a recipe, checked: runs that follow each other, each from the student of the one before.

Each goes on from what those before it have left: their few steps and base.
"""

import dataclasses
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from operator import eq
from pathlib import Path
from typing import NamedTuple

from wandistiller.batch import PATH
from wandistiller.checkpoint import manifest
from wandistiller.checkpoint.loading import read_state
from wandistiller.config import identity
from wandistiller.config.adapter_files import start_bases, start_files
from wandistiller.config.job import Job
from wandistiller.config.recipe import ENGINE, TEACHER, Recipe, in_stages
from wandistiller.config.run_config import AUTO, RunConfig
from wandistiller.config.start import DONE, recorded_stages
from wandistiller.config.validate import read_job
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.experts import Expert
from wandistiller.flow import EULER, FewSteps
from wandistiller.objectives.objective import read_objective
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import RECIPE, ConfigError, Problem
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
        identity.write_settings(job)
    if stages[0].stage:
        output, pictures = whole_output(stages), stages[0].run.sample_dir
        folders = {"output_dir": str(output)}
        folders |= {"sample_dir": str(Path(pictures).parent)} if pictures else {}
        runs = {job.stage: identity.settings_as_run(job) for job in stages}
        write_json(output / "resolved" / "run.json", in_stages(runs, folders))


class Trained(NamedTuple):
    """The sampler that an expert is trained for, None if it is not known; in words; whose training it was."""

    few: FewSteps | None
    sampler: str = ""
    whose: str = ""


def order_problems(stages: list[Job]) -> dict[Problem, str]:
    """Return problem -> stage, of stages that do not go on from what those before have left.

    An expert is of few steps as the last stage made it that trained it for few, or the run that the first
    one starts from. Both must agree at the end, and where samples begin with the high-noise expert; so one
    may be refined for fewer steps, and then the other. A stage that has begun goes on in any order.
    """
    problems: dict[Problem, str] = {}
    trained, last = _trained_before(stages[0]), [job for job in stages if job.schedule.few][-1:]
    for number, job in enumerate(stages):
        texts, others = [*_other_sampler(job, trained, is_last=job in last)], []
        if not (job.resume_from or job.is_spent):
            texts += _other_order(job, trained, stages[:number], stages[number + 1 :])
            others = filter(None, [_base_problem(job), _ignored_start_problem(job, stages[:number])])
        of_objective = [Problem(f"`objective` {text}", RECIPE, "objective") for text in texts]
        problems |= dict.fromkeys([*of_objective, *others], job.stage)
        if few := job.schedule.few:
            sampler = _sampler(job.objective.sampling_steps, few, job.run.shift)
            trained |= dict.fromkeys(job.networks.learning, Trained(few, sampler, f"stage {job.stage}"))
    return problems


def _trained_before(first: Job) -> dict[Expert, Trained]:
    """Return the experts of few steps that a recipe's first stage begins with."""
    facts, is_new = first.start and first.start.facts, first.student.init in ("teacher", "random")
    if not facts:
        base = start_bases(first).get(Expert.HIGH_NOISE)
        begins = not is_new or any(file.is_for(base) for file in start_files(first) if base)
        return {Expert.HIGH_NOISE: Trained(None)} if begins else {}
    if not facts.few_steps:
        return {}
    few = FewSteps(tuple(facts.few_steps), facts.boundary, facts.sampler or EULER)
    whose = f"the run {first.start.folder}, which `init` names,"
    made = Trained(few, _sampler(facts.steps, few, facts.shift), whose)
    expert = Expert.of_key(facts.trained_expert)
    return {Expert.HIGH_NOISE: Trained(None)} | ({expert: made} if expert else {})


def _sampler(steps: int, few: FewSteps, shift: float) -> str:
    return f"{steps} steps ({few.sampler}, shift {shift:g})"


def _other_sampler(job: Job, trained: dict[Expert, Trained], *, is_last: bool) -> Iterator[str]:
    """Say that an expert is trained for another sampler than the other one has."""
    expert, few = job.objective.trained_expert, job.schedule.few
    other = next(each for each in Expert if each is not expert)
    before = trained.get(other, Trained(None))
    if expert and few and before.few not in (None, few) and (is_last or expert is not Expert.HIGH_NOISE):
        sampler = _sampler(job.objective.sampling_steps, few, job.run.shift)
        yield (
            f"trains the {expert.in_words} for {sampler}, but {before.whose} the {other.in_words} for "
            f"{before.sampler}. One sampler draws with both: write the same steps, sampler and shift."
        )


def _other_order(
    job: Job, trained: dict[Expert, Trained], before: list[Job], after: list[Job]
) -> Iterator[str]:
    """Say that a stage comes before what its samples begin with, or makes a student of few steps another."""
    if job.objective.trained_expert is Expert.LOW_NOISE and Expert.HIGH_NOISE not in trained:
        few = (stage for stage in after if stage.schedule.few)
        later = [stage.stage for stage in few if Expert.HIGH_NOISE in stage.networks.learning]
        remedy = 'Train that first, by "expert": "high_noise"'
        remedy = f"Put stage {later[0]} before this one" if later else remedy
        yield (
            "trains the low-noise expert, whose samples begin with the high-noise expert, and that is not "
            f"trained for few steps yet. {remedy}."
        )
    few = next((stage for stage in before if stage.schedule.few), None)
    if few and not job.schedule.few:
        yield (
            f"is for any number of sampling steps, and stage {few.stage} has trained the student for "
            f"{few.objective.sampling_steps}. Put this stage before it."
        )


def _base_problem(job: Job) -> Problem | None:
    """Return the problem of a run that goes on from adapters of the teacher, and not on their base."""
    start = job.start
    if not (start and start.facts.bases) or job.run.lora is None and not job.previous:
        return None
    whose, remedy = f"the run {start.folder}", "Give the teacher of that run."
    if job.previous:
        whose, remedy = f"stage {job.previous.stage}", "Write it once, outside of `stages`."
    if job.run.lora is None:
        key, text = "lora", f"is missing, and {whose} trains adapters: this one would train all weights of "
        text += "a copy of the teacher"
    elif start.teacher == job.folder.identity:
        return None
    else:
        is_same_style = (start.facts.teacher_lora or []) == (job.run.teacher_lora or [])
        key = "teacher_path" if is_same_style else "teacher_lora"
        text = f"gives another teacher than that of {whose}, whose adapters this run begins with: each role "
        text += "would need a copy of the whole network"
    return Problem(f"`{key}` {text}. {remedy}", RECIPE, key)


def _ignored_start_problem(job: Job, before: list[Job]) -> Problem | None:
    """Return the problem of a stage with a start for adapters that begin with those of the stage before."""
    named = (job.run.lora or {}).get("start")
    if not named or not before or named in [(stage.run.lora or {}).get("start") for stage in before]:
        return None
    text = f"`lora.start` is {named}, but the adapters of this stage begin with those of stage "
    text += f'{before[-1].stage}. Write it in the first stage, of two experts {{"high_noise": FILE, '
    return Problem(f'{text}"low_noise": FILE}}.', RECIPE, "lora.start")
