"""Check that a run goes on from what the runs before it have left: their few steps, and their base."""

from typing import NamedTuple

from wandistiller.config.adapter_files import start_bases, start_files
from wandistiller.config.job import Job
from wandistiller.experts import Expert
from wandistiller.flow import EULER, FewSteps
from wandistiller.utils.errors import RECIPE, Problem


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
        before, after = stages[:number], stages[number + 1 :]
        found = [_sampler_problem(job, trained, is_last=job in last)]
        if not (job.resume_from or job.is_spent):
            found += [_untrained_problem(job, trained, after), _many_steps_problem(job, before)]
            found += [_base_problem(job), _ignored_start_problem(job, before)]
        problems |= dict.fromkeys(filter(None, found), job.stage)
        if few := job.schedule.few:
            made = Trained(
                few, _sampler(job.objective.sampling_steps, few, job.run.shift), f"stage {job.stage}"
            )
            trained |= dict.fromkeys(job.networks.learning, made)
    return problems


def _trained_before(first: Job) -> dict[Expert, Trained]:
    """Return the experts of few steps that a recipe's first stage begins with."""
    facts, is_new = first.start and first.start.facts, first.student.init in ("teacher", "random")
    if not facts:
        base = start_bases(first).get(Expert.HIGH_NOISE)
        begins = not is_new or any(one.is_for(base) for one in start_files(first) if base)
        return {Expert.HIGH_NOISE: Trained(None)} if begins else {}
    if not facts.few_steps:
        return {}
    few = FewSteps(tuple(facts.few_steps), facts.boundary, facts.sampler or EULER)
    whose = f"the run {first.start.folder}, which `init` names,"
    made = Trained(few, _sampler(facts.steps, few, facts.shift), whose)
    own = Expert.of_key(facts.trained_expert)
    return {Expert.HIGH_NOISE: Trained(None)} | ({own: made} if own else {})


def _sampler(steps: int, few: FewSteps, shift: float) -> str:
    return f"{steps} steps ({few.sampler}, shift {shift:g})"


def _of_objective(text: str) -> Problem:
    return Problem(text, RECIPE, "objective")


def _sampler_problem(job: Job, trained: dict[Expert, Trained], *, is_last: bool) -> Problem | None:
    """Return the problem of an expert that is trained for another sampler than the other one has."""
    own, few = job.objective.trained_expert, job.schedule.few
    other = next(expert for expert in Expert if expert is not own)
    before = trained.get(other, Trained(None))
    if not (own and few) or before.few in (None, few) or own is Expert.HIGH_NOISE and not is_last:
        return None
    sampler = _sampler(job.objective.sampling_steps, few, job.run.shift)
    return _of_objective(
        f"`objective` trains the {own.in_words} for {sampler}, but {before.whose} the {other.in_words} for "
        f"{before.sampler}. One sampler draws with both: write the same steps, sampler and shift."
    )


def _untrained_problem(job: Job, trained: dict[Expert, Trained], after: list[Job]) -> Problem | None:
    """Return the problem of a low-noise expert whose samples begin with what nothing has trained."""
    if job.objective.trained_expert is not Expert.LOW_NOISE or Expert.HIGH_NOISE in trained:
        return None
    later = (one.stage for one in after if one.schedule.few and Expert.HIGH_NOISE in one.networks.learning)
    stage = next(later, "")
    remedy = f"Put stage {stage} before this one" if stage else 'Train that first, by "expert": "high_noise"'
    return _of_objective(
        "`objective` trains the low-noise expert, whose samples begin with the high-noise expert, and that "
        f"is not trained for few steps yet. {remedy}."
    )


def _many_steps_problem(job: Job, before: list[Job]) -> Problem | None:
    """Return the problem of a stage that would make a student of few steps one of any number."""
    few = next((one for one in before if one.schedule.few), None)
    if job.schedule.few or not few:
        return None
    return _of_objective(
        f"`objective` is for any number of sampling steps, and stage {few.stage} has trained the student for "
        f"{few.objective.sampling_steps}. Put this stage before it."
    )


def _base_problem(job: Job) -> Problem | None:
    """Return the problem of a run that goes on from adapters of the teacher, and not on their base."""
    start = job.start
    if not (start and start.facts.bases) or job.run.lora is None and not job.previous:
        return None
    whose = f"stage {job.previous.stage}" if job.previous else f"the run {start.folder}"
    remedy = "Write it once, outside of `stages`." if job.previous else "Give the teacher of that run."
    if job.run.lora is None:
        text = f"`lora` is missing, and {whose} trains adapters: this one would train all weights of a copy"
        return Problem(f"{text} of the teacher. {remedy}", RECIPE, "lora")
    if start.teacher == job.folder.identity:
        return None
    is_same_style = (start.facts.teacher_lora or []) == (job.run.teacher_lora or [])
    key = "teacher_path" if is_same_style else "teacher_lora"
    text = (
        f"`{key}` gives another teacher than that of {whose}, whose adapters this run begins with: each role"
    )
    return Problem(f"{text} would need a copy of the whole network. {remedy}", RECIPE, key)


def _ignored_start_problem(job: Job, before: list[Job]) -> Problem | None:
    """Return the problem of a stage with a start for adapters that begin with those of the stage before."""
    named = (job.run.lora or {}).get("start")
    if not named or not before or named in [(one.run.lora or {}).get("start") for one in before]:
        return None
    text = (
        f"`lora.start` is {named}, but the adapters of this stage begin with those of stage "
        f'{before[-1].stage}. Write it in the first stage, of two experts {{"high_noise": FILE, "low_noise": '
        "FILE}."
    )
    return Problem(text, RECIPE, "lora.start")
