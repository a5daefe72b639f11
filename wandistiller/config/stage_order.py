"""Check that a run can go on from what the runs before it have left: their few steps, and their base."""

from wandistiller.config.job import Job
from wandistiller.experts import Expert
from wandistiller.student.start_places import start_places


def order_problems(stages: list[Job]) -> dict[str, str]:
    """Return problem -> stage, of stages that have not begun and would lose what others train.

    The low-noise expert's samples begin with a high-noise expert of few steps, a student of few steps stays
    one, and adapters stay on one base, of which each role would else need a copy.
    """
    problems: dict[str, str] = {}
    for number, job in enumerate(stages):
        if job.resume_from or job.is_spent:
            continue
        before, after = stages[:number], stages[number + 1 :]
        found = [_untrained_problem(job, before, after), _many_steps_problem(job, before)]
        found += [_base_problem(job), _ignored_start_problem(job, before)]
        problems |= dict.fromkeys(filter(None, found), job.stage)
    return problems


def _untrained_problem(job: Job, before: list[Job], after: list[Job]) -> str | None:
    """Return the problem of a low-noise expert whose samples begin with what nothing has trained."""
    if job.objective.trained_expert is not Expert.LOW_NOISE or any(map(_trains_high, before)):
        return None
    if _begins_in_few_steps([*before, job][0]):
        return None
    later = next((one.stage for one in after if _trains_high(one)), "")
    remedy = f"Put stage {later} before this one" if later else 'Train that first, by "expert": "high_noise"'
    return (
        "`objective` trains the low-noise expert, whose samples begin with the high-noise expert, and that "
        f"is not trained for few steps yet. {remedy}."
    )


def _begins_in_few_steps(job: Job) -> bool:
    """Return whether a run's student is one of few steps before training, as far as that is known."""
    if job.start:
        return bool(job.start.facts.few_steps)
    is_new = job.student.init in ("teacher", "random")
    return not is_new or bool(job.run.lora) and Expert.HIGH_NOISE in start_places(job)


def _trains_high(job: Job) -> bool:
    return bool(job.schedule.few) and Expert.HIGH_NOISE in job.trained_experts


def _many_steps_problem(job: Job, before: list[Job]) -> str | None:
    """Return the problem of a stage that would make a student of few steps one of any number."""
    few = next((one for one in before if one.schedule.few), None)
    if job.schedule.few or not few:
        return None
    return (
        f"`objective` is for any number of sampling steps, and stage {few.stage} has trained the student for "
        f"{few.objective.sampling_steps}. Put this stage before it."
    )


def _base_problem(job: Job) -> str | None:
    """Return the problem of a run that goes on from adapters of the teacher, and not on their base."""
    start = job.start
    if not (start and start.facts.bases):
        return None
    whose = f"stage {job.previous.stage}" if job.previous else f"the run {start.folder}"
    remedy = "Write it once, outside of `stages`." if job.previous else "Give the teacher of that run."
    if job.run.lora is None and job.previous:
        return (
            f"recipe: `lora` is missing, and {whose} trains adapters: this one would train all weights of a "
            f"copy of the teacher. {remedy}"
        )
    if job.run.lora is None or start.teacher == job.folder.identity:
        return None
    is_same_style = (start.facts.teacher_lora or []) == (job.run.teacher_lora or [])
    key = "teacher_path" if is_same_style else "teacher_lora"
    return (
        f"recipe: `{key}` gives another teacher than that of {whose}, whose adapters this run begins with: "
        f"each role would need a copy of the whole network. {remedy}"
    )


def _ignored_start_problem(job: Job, before: list[Job]) -> str | None:
    """Return the problem of a stage with a start for adapters that begin with those of the stage before."""
    named = (job.run.lora or {}).get("start")
    if not named or not before or named in [(one.run.lora or {}).get("start") for one in before]:
        return None
    return (
        f"recipe: `lora.start` is {named}, but the adapters of this stage begin with those of stage "
        f'{before[-1].stage}. Write it in the first stage, of two experts {{"high_noise": FILE, "low_noise": '
        "FILE}."
    )
