"""Check that runs that train the experts of one student train them for one few-step sampler."""

from wandistiller.config.job import Job
from wandistiller.experts import Expert
from wandistiller.flow import EULER


def same_sampler_problems(stages: list[Job]) -> dict[str, str]:
    """Return problem -> stage, of stages that train one expert for another sampler than the other expert has.

    An expert has that of the last few-step stage that trained it. Both must agree at the end, and where
    samples begin with the high-noise expert; so one may be refined for fewer steps, and then the other.

    The run that the first stage starts from counts by its facts, where it trained the other expert.
    """
    few_step = [job for job in stages if job.schedule.few]
    trained: dict[Expert, Job] = {}
    problems: dict[str, str] = {}
    for job in few_step:
        trained |= dict.fromkeys(job.trained_experts, job)
        own = job.objective.trained_expert
        if own and job is few_step[-1] and len(trained) < 2 and (text := _start_problem(stages[0], job)):
            problems.setdefault(text, job.stage)
        if not own or len(trained) < 2 or (own is Expert.HIGH_NOISE and job is not few_step[-1]):
            continue
        other = next(expert for expert in Expert if expert is not own)
        before = trained[other]
        if before.schedule.few != job.schedule.few:
            text = (
                f"`objective` trains the {own.in_words} for {_sampler(job)}, but stage {before.stage} "
                f"the {other.in_words} for {_sampler(before)}. One sampler draws with both: write the same "
                "steps, sampler and shift in both stages."
            )
            problems.setdefault(text, job.stage)
    return problems


def _start_problem(first: Job, job: Job) -> str | None:
    """Return the problem of a job that trains one expert, if the start of `first` trained the other one."""
    facts = first.start and first.start.facts
    own, few = job.objective.trained_expert, job.schedule.few
    other = next(expert for expert in Expert if expert is not own)
    if not facts or not facts.few_steps or facts.trained_expert != other.key:
        return None
    trained = tuple(facts.few_steps), facts.sampler or EULER, facts.boundary
    if trained == (few.sigmas, few.sampler, few.boundary):
        return None
    return (
        f"`objective` trains the {own.in_words} for {_sampler(job)}, but the run {first.start.folder}, "
        f"which `init` names, the {other.in_words} for {facts.steps} steps ({trained[1]}, shift "
        f"{facts.shift:g}). One sampler draws with both: write the same steps, sampler and shift."
    )


def _sampler(job: Job) -> str:
    objective = job.objective
    return f"{objective.sampling_steps} steps ({objective.few_step_sampler}, shift {job.run.shift:g})"
