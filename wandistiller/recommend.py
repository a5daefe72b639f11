"""The fastest of the shipped JSONs that fit a machine, for student and teacher together."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from wandistiller.advice import STUDENT_JSONS
from wandistiller.check import block_problems
from wandistiller.config import read_json
from wandistiller.costs import Costs
from wandistiller.deepspeed_json import dtype_name, load, student_engine, teacher_engine
from wandistiller.deepspeed_keys import BATCH_KEYS
from wandistiller.engines import config_problems
from wandistiller.job import Job
from wandistiller.machine import Demand, Machine, candidates, demands, placed
from wandistiller.memory import Bytes
from wandistiller.placement import BLOCK, read_placement, without_block
from wandistiller.planner import most, plan
from wandistiller.problems import ConfigError
from wandistiller.rates import Rates
from wandistiller.student_json import ACCUMULATION, MICRO, TOTAL
from wandistiller.tuning import tuning_problems

KEPT = (*BATCH_KEYS, "zero_optimization", "aio")
"""Keys of a student JSON that are chosen here; the others are the run's."""


STUDENTS = ("zero0", "zero1", *STUDENT_JSONS)
"""In ds_configs/student/, the simplest first."""
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

    def lines(self, machine: Machine) -> list[str]:
        """What is said of it once it is chosen."""
        return [f"chosen    {self}", f"          {self.why(machine)}"]

    @property
    def settings(self) -> dict[str, Any]:
        """The engines as recipe keys, of this very run: names of files where those say it all, else their content."""
        j, ranks = self.job, self.job.batch.ranks
        student, teacher = ([] if name == OWN else [f"ds_configs/{kind}/{name}.json"]
                            for kind, name in (("student", self.student), ("teacher", self.teacher)))  # fmt: skip
        batch = {TOTAL: j.batch.total, MICRO: j.batch.micro}
        cut = [{k: v for k, v in ds.items() if k not in BATCH_KEYS} | batch for ds in (*map(read_json, student), j.student_ds)]
        return {"deepspeed_config": next(s for s in (*student, *cut) if student_engine("", load(s)[1], ranks)[0] == j.student_ds),
                "teacher_deepspeed_config": next(
                    t for t in (*teacher, j.teacher_ds) if teacher_engine("", load(t)[1], ranks) == j.teacher_ds)}  # fmt: skip

    def __str__(self) -> str:
        batch = self.job.batch
        return f"student {self.student}, teacher {self.teacher}, micro-batch {batch.micro} x {batch.accumulation}"


def choices(job: Job, machine: Machine, rates: Rates, here: bool = False) -> list[Choice]:
    """All combinations of shipped JSONs that fit, with a reserve, in the order of `fitting`; `here` as in `ranked`."""
    return fitting(ranked(job, machine, rates, here=here), machine)


def fitting(every: list[Choice], machine: Machine) -> list[Choice]:
    """Those of which nothing is short; of those about as fast as the fastest, the simplest first."""
    fits = [choice for choice in every if all(d.is_met for d in choice.demands(machine))]
    equal = (1 + EQUAL) * min((choice.seconds for choice in fits), default=0)
    return sorted(fits, key=lambda choice: (max(choice.seconds, equal), choice.order))


def ranked(
    job: Job, machine: Machine, rates: Rates, *, student: bool = True, teacher: bool = True, here: bool = False
) -> list[Choice]:
    """Every combination at the run's global batch that its other settings allow, the fastest first.

    Args:
        student: whether its engine is to be chosen; else it stays as it is.
        teacher: whether its placement is.
        here: `machine` is this one, which must be able to build the engines.
    """
    found = []
    for s, (name, changed) in enumerate(_students(job, here) if student else [(OWN, job)]):
        placed = _teachers(changed, machine, here) if teacher else [(OWN, changed)]
        for t, (place, both) in enumerate(placed):
            found.append(Choice(name, place, both, most(plan(both, machine)), Costs(both, machine, rates).floor(), (s, t)))
    return sorted(found, key=lambda c: (c.seconds, c.order))


def _students(job: Job, here: bool) -> Iterator[tuple[str, Job]]:
    own = {k: v for k, v in job.student_ds.items() if k not in KEPT}
    for name in STUDENTS:
        ours = {k: v for k, v in read_json(f"ds_configs/student/{name}.json").items() if k in ("zero_optimization", "aio")}
        made = list(_micro_batches(job, own | ours))
        if made and not tuning_problems(job.run, job.student_transformer, made[0].student_ds) \
                and not (here and config_problems("", without_block(made[0].student_ds))):  # fmt: skip
            yield from ((name, changed) for changed in made)


def _micro_batches(job: Job, ds: dict[str, Any]) -> Iterator[Job]:
    """The run with the engine `ds`, its batch cut into micro-steps in all ways that it allows."""
    share = job.batch.total // job.batch.ranks
    for micro in (m for m in (1, 2, 4, 8, 16, 32) if share % m == 0):
        with suppress(ConfigError):  # it does not go with the rest of the run's JSON
            made, batch = student_engine("", ds | {MICRO: micro, ACCUMULATION: share // micro}, job.batch.ranks)
            if not block_problems(job.run, {"batch": batch}):
                yield replace(job, student_ds=made, batch=batch)


def _teachers(job: Job, machine: Machine, here: bool) -> Iterator[tuple[str, Job]]:
    dtype, passes = dtype_name(job.teacher_ds), read_placement(job.teacher_ds).guidance_passes
    for name in candidates(machine):
        ds = teacher_engine(name, placed(name, dtype), machine.ranks)
        if passes != 1:
            ds = ds | {BLOCK: ds.get(BLOCK, {}) | {"guidance_passes": passes}}
        if not (here and config_problems("", without_block(ds))):
            yield name, replace(job, teacher_ds=ds)
