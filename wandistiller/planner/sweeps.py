"""Sweeps of one base that all roles have: how often its weights come to the device in a step."""

from math import ceil

from wandistiller.batch import STUDENT
from wandistiller.config.job import Job


def base_sweeps(job: Job) -> dict[str, float]:
    """Return the mean number of sweeps in a step, by their purpose; empty if the weights stay."""
    if not (job.shares_base and job.teacher.sweeps):
        return {}
    steps, objective = job.batch.accumulation, job.objective
    updates = len(objective.updates)
    sweeps: dict[str, float] = {}
    if objective.calls_at_samples:
        together, calls = job.rolled_out, objective.student_calls(job.schedule)
        if together > 1:  # as many as the longest; those of other roles have one more
            longest = max(job.schedule.exits()) + (updates > 1)
            sweeps["the student's samples"] = ceil(updates * steps / together) * longest
        else:
            sweeps["the student's samples"] = steps * calls
    elif calls := objective.student_calls(job.schedule):
        sweeps["the student's targets"] = steps * calls
    groups = ceil(steps / job.swept)
    if objective.predicts_at_noised:
        sweeps["the teacher's predictions"] = groups
    if objective.calls_at_samples:  # with more micro-steps their samples are known from a pass before
        sweeps["scores at samples"] = groups * (1 if job.swept == 1 or steps == 1 else 2)
    sweeps["learning, forward and backward"] = 2 * steps * updates
    return sweeps


def sweeps_of(job: Job, role: str) -> float:
    """Return the mean number of sweeps for a micro-step of a role's network, the teacher's own left out."""
    if role != STUDENT:
        return 2.0
    sweeps = base_sweeps(job)
    own = sweeps.get("the student's samples", 0) + sweeps.get("the student's targets", 0)
    return 2.0 + own / job.batch.accumulation
