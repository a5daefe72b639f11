"""Check that stages that train the experts of one student train them for one few-step sampler."""

from wandistiller.config.job import Job
from wandistiller.experts import Expert

NAMES = {Expert.HIGH_NOISE: "high-noise", Expert.LOW_NOISE: "low-noise"}


def same_sampler_problems(stages: list[Job]) -> dict[str, str]:
    """Return problem -> stage, of stages that train one expert for another sampler than the other expert has.

    An expert has that of the last few-step stage that trained it. Both must agree at the end, and where
    samples begin with the high-noise expert; so one may be refined for fewer steps, and then the other.
    """
    few_step = [job for job in stages if job.schedule.few]
    trained: dict[Expert, Job] = {}
    problems: dict[str, str] = {}
    for job in few_step:
        trained |= dict.fromkeys(job.trained_experts, job)
        own = job.objective.trained_expert
        if not own or len(trained) < 2 or (own is Expert.HIGH_NOISE and job is not few_step[-1]):
            continue
        other = next(expert for expert in Expert if expert is not own)
        before = trained[other]
        if before.schedule.few != job.schedule.few:
            text = (
                f"`objective` trains the {NAMES[own]} expert for {_sampler(job)}, but stage {before.stage} "
                f"the {NAMES[other]} one for {_sampler(before)}. One sampler draws with both: write the same "
                "steps, sampler and shift in both stages."
            )
            problems.setdefault(text, job.stage)
    return problems


def _sampler(job: Job) -> str:
    objective = job.objective
    return f"{objective.sampling_steps} steps ({objective.few_step_sampler}, shift {job.run.shift:g})"
