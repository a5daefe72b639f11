"""Trainers as `wandistiller train` makes them, to be looked into."""

import dataclasses
from typing import Any

from wandistiller.batch import STUDENT
from wandistiller.checkpoint import resume
from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.conditions import Conditions
from wandistiller.distributed import collectives
from wandistiller.teacher.base import Teacher
from wandistiller.training.build_student import NetworkBuilder, build_others, build_student
from wandistiller.training.prepare import guided_teacher, prepare, ranks_of
from wandistiller.training.trainer import Trainer

Parts = tuple[CachedData, Conditions, Teacher]


def job_of(values: dict[str, Any]) -> Job:
    """Check a recipe, and find the checkpoint that its run resumes."""
    job = read_job(RunConfig(**values), collectives.world_size())
    return dataclasses.replace(job, resume_from=resume.latest_valid(job.output, job.run.resume))


def parts_of(job: Job) -> Parts:
    """Prepare the data, and load the teacher."""
    ranks = ranks_of(job)
    data, conditions, teacher = prepare(job, ranks)
    return data, conditions, teacher or guided_teacher(job, conditions, ranks)


def trainer_of(values: dict[str, Any], parts: Parts | None = None) -> Trainer:
    """Make a trainer of its own parts, or of those of another run."""
    job = job_of(values)
    ranks = ranks_of(job)
    parts = parts or parts_of(job)
    builder = NetworkBuilder(job, parts[-1], ranks=ranks)
    learners = {STUDENT: build_student(builder)} | build_others(builder)
    return Trainer(job, *parts, learners)
