"""Advice after memory ran out: flags that take less of it, and the command that plans the rest."""

from collections.abc import Iterator
from itertools import islice

import torch

from wandistiller.config.job import Job

SHOWN = 3
"""Number of flags."""
PLAN = "`wandistiller plan` with the same recipe and flags says what takes how much, and which JSONs fit"


def advice(job: Job, preparing: bool = False) -> list[str]:
    """Return the first flags that a run out of memory lacks, those that cost least first, and PLAN.

    Args:
        preparing: the cache was being filled, so that there was no student yet.
    """
    return [*islice(_flags(job, preparing), SHOWN), PLAN]


def _flags(job: Job, preparing: bool) -> Iterator[str]:
    if preparing and job.run.prepare_batch > 1:
        yield "--prepare_batch 1"
    if not preparing and not job.student_engine.recompute:
        yield "--gradient_checkpointing"
    if job.teacher.engine.dtype is torch.float32:
        yield "--teacher_dtype bfloat16"
    if not preparing and job.batch.micro > 1:
        yield "--batch_size 1"
    yield "--deepspeed_config auto --teacher_deepspeed_config auto: the JSONs and micro-batch that fit"
    yield "--num_frames, --height, --width: fewer frames or pixels"
    yield "--student_config FILE: a student of fewer layers"
