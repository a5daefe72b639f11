"""The fastest of the shipped JSONs that fit a machine, for student and teacher together."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from wandistiller.advice import STUDENT_JSONS
from wandistiller.config import read_json
from wandistiller.costs import Costs
from wandistiller.deepspeed_json import BatchSize, dtype_name, student_engine, teacher_engine
from wandistiller.deepspeed_keys import BATCH_KEYS
from wandistiller.job import Job
from wandistiller.machine import Machine, candidates, demands, placed
from wandistiller.memory import Bytes
from wandistiller.placement import BLOCK, read_placement
from wandistiller.planner import most, plan
from wandistiller.problems import ConfigError
from wandistiller.rates import Rates
from wandistiller.student_json import ACCUMULATION, MICRO

KEPT = (*BATCH_KEYS, "zero_optimization", "aio")
"""Keys of a student JSON that are chosen here; the others are the run's."""


class Choice(NamedTuple):
    """A student JSON, a teacher JSON and a micro-batch, with what they take and how long a step lasts at least."""

    student: str
    """Of the file in ds_configs/student/, without .json."""
    teacher: str
    """Of the file in ds_configs/teacher/."""
    job: Job
    takes: Bytes
    seconds: float

    @property
    def settings(self) -> dict[str, Any]:
        """The same as recipe keys: names of files where those say it all, else their content."""
        shipped, batch = read_json(f"ds_configs/student/{self.student}.json"), self.job.batch
        own = {k: v for k, v in shipped.items() if k not in BATCH_KEYS} | {MICRO: batch.micro, ACCUMULATION: batch.accumulation}
        same = all(shipped.get(k) == own[k] for k in (MICRO, ACCUMULATION))
        return {"deepspeed_config": f"ds_configs/student/{self.student}.json" if same else own,
                "teacher_deepspeed_config": f"ds_configs/teacher/{self.teacher}.json"}  # fmt: skip

    def __str__(self) -> str:
        batch = self.job.batch
        return f"student {self.student}, teacher {self.teacher}, micro-batch {batch.micro} x {batch.accumulation}"


def choices(job: Job, machine: Machine, rates: Rates) -> list[Choice]:
    """All that fit, with a reserve, the fastest first; of equals that which moves least, as its floor is nearest to the truth."""
    found = [c for c in _all(job, machine, rates) if all(d.is_met for d in demands(c.takes, machine))]
    places = candidates(machine)
    return sorted(found, key=lambda c: (round(c.seconds, 3), STUDENT_JSONS.index(c.student), places.index(c.teacher),
                                        c.job.batch.micro))  # fmt: skip


def _all(job: Job, machine: Machine, rates: Rates) -> Iterator[Choice]:
    """Every combination at the run's global batch."""
    for student, changed in _students(job):
        for teacher, both in _teachers(changed, machine) if job.objective.needs_teacher else [("replicated", changed)]:
            yield Choice(student, teacher, both, most(plan(both, machine)), Costs(both, machine, rates).floor())


def _students(job: Job) -> Iterator[tuple[str, Job]]:
    own = {k: v for k, v in job.student_ds.items() if k not in KEPT}
    share = job.batch.total // job.batch.ranks
    for name in STUDENT_JSONS:
        ours = {k: v for k, v in read_json(f"ds_configs/student/{name}.json").items() if k in ("zero_optimization", "aio")}
        for micro in (m for m in (1, 2, 4, 8, 16, 32) if share % m == 0):
            try:
                ds, batch = student_engine(name, own | ours | {MICRO: micro, ACCUMULATION: share // micro}, job.batch.ranks)
            except ConfigError:
                continue  # it does not go with the rest of the run's JSON
            yield name, replace(job, student_ds=ds, batch=BatchSize(micro, share // micro, batch.total))


def _teachers(job: Job, machine: Machine) -> Iterator[tuple[str, Job]]:
    dtype, passes = dtype_name(job.teacher_ds), read_placement(job.teacher_ds).guidance_passes
    for name in candidates(machine):
        ds = teacher_engine(name, placed(name, dtype), machine.ranks)
        if passes != 1:
            ds = ds | {BLOCK: ds.get(BLOCK, {}) | {"guidance_passes": passes}}
        yield name, replace(job, teacher_ds=ds)
