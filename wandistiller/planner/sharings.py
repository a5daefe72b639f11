"""Numbers of ranks that may compute each sample of a run together, where the run leaves it open."""

from collections.abc import Iterator
from dataclasses import replace

from wandistiller.config.job import Job
from wandistiller.config.sequence_checks import sequence_problems
from wandistiller.engine.ds_config import BatchSize
from wandistiller.engine.ds_overrides import ACCUMULATION, MICRO
from wandistiller.planner.machine import Machine

NUMBERS = (2, 4, 8)


def sharings(job: Job, machine: Machine) -> Iterator[Job]:
    """Yield the run, and a video's with each number of a node's ranks that divides its heads and tokens."""
    yield job
    if job.run.num_frames == 1 or job.run.context_parallel > 1:
        return
    parts = {key: getattr(job, key) for key in ("folder", "objective", "student_transformer")}
    for number in NUMBERS:
        run, share = replace(job.run, context_parallel=number), job.batch.total * number // machine.ranks
        if machine.ranks_on_node % number or sequence_problems(run, parts, machine.ranks):
            continue
        batch = BatchSize(1, share, job.batch.total)
        yield replace(job, run=run, batch=batch, student_ds=job.student_ds | {MICRO: 1, ACCUMULATION: share})
