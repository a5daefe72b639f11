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
from wandistiller.machine import Demand, Machine, candidates, demands, placed
from wandistiller.memory import Bytes
from wandistiller.placement import BLOCK, read_placement
from wandistiller.planner import most, plan
from wandistiller.problems import ConfigError
from wandistiller.rates import Rates
from wandistiller.student_json import ACCUMULATION, MICRO, TOTAL

KEPT = (*BATCH_KEYS, "zero_optimization", "aio")
"""Keys of a student JSON that are chosen here; the others are the run's."""


EQUAL = 0.01
"""Share of a step's time within which two floors are taken for equal, as they leave out more than that."""
OWN = "as given"
"""Of what is not chosen, instead of a file's name."""


class Choice(NamedTuple):
    """A student JSON, a teacher JSON and a micro-batch, with what they take and how long a step lasts at least."""

    student: str
    """Of the file in ds_configs/student/, without .json."""
    teacher: str
    """Of the file in ds_configs/teacher/."""
    job: Job
    takes: Bytes
    seconds: float
    order: tuple[int, int]
    """Its place among students' and teachers' JSONs, of which the first are the simplest and move least."""

    def demands(self, machine: Machine) -> list[Demand]:
        """What it takes of each kind of memory of `machine`."""
        return [d for d in demands(self.takes, machine) if d.need]

    def short(self, machine: Machine) -> Demand:
        """The kind of memory of which most is missing, or least is left."""
        return max(self.demands(machine), key=lambda d: d.over)

    def why(self, machine: Machine) -> str:
        """Its numbers, in words."""
        taken = self.demands(machine)
        return (f"takes {' and '.join(map(str, taken))} at most; free are {' and '.join(d.supply for d in taken)}; a step lasts "
                f"{self.seconds:.3g} s at least")  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """The same as recipe keys: names of files where those say it all, else their content."""
        shipped, batch = read_json(f"ds_configs/student/{self.student}.json"), self.job.batch
        own = {k: v for k, v in shipped.items() if k not in BATCH_KEYS} | {TOTAL: batch.total, MICRO: batch.micro}
        same = (shipped.get(MICRO), shipped.get(ACCUMULATION)) == (batch.micro, batch.accumulation)
        teacher = {} if self.teacher == OWN else {"teacher_deepspeed_config": f"ds_configs/teacher/{self.teacher}.json"}
        return {"deepspeed_config": f"ds_configs/student/{self.student}.json" if same else own} | teacher

    def __str__(self) -> str:
        batch = self.job.batch
        return f"student {self.student}, teacher {self.teacher}, micro-batch {batch.micro} x {batch.accumulation}"


def choices(job: Job, machine: Machine, rates: Rates) -> list[Choice]:
    """All combinations of shipped JSONs that fit, with a reserve, in the order of `ranked`."""
    return fitting(ranked(job, machine, rates), machine)


def fitting(every: list[Choice], machine: Machine) -> list[Choice]:
    """Those of which nothing is short; of those about as fast as the fastest, the simplest first."""
    fits = [choice for choice in every if all(d.is_met for d in choice.demands(machine))]
    equal = (1 + EQUAL) * min((choice.seconds for choice in fits), default=0)
    return sorted(fits, key=lambda choice: (max(choice.seconds, equal), choice.order))


def ranked(job: Job, machine: Machine, rates: Rates, *, student: bool = True, teacher: bool = True) -> list[Choice]:
    """Every combination at the run's global batch, the fastest first.

    Args:
        student: whether its engine is to be chosen; else it stays as it is.
        teacher: whether its placement is.
    """
    found = []
    for s, (name, changed) in enumerate(_students(job) if student else [(OWN, job)]):
        placed = _teachers(changed, machine) if teacher and job.objective.needs_teacher else [(OWN, changed)]
        for t, (place, both) in enumerate(placed):
            found.append(Choice(name, place, both, most(plan(both, machine)), Costs(both, machine, rates).floor(), (s, t)))
    return sorted(found, key=lambda c: (c.seconds, c.order))


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
