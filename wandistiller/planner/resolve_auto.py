"""Decides `auto`: the student's engine and the teacher's placement become the fastest shipped JSONs that fit.

`plan --recommend` and the advice after memory ran out compare the same combinations. (The word `auto` in a
teacher JSON is read by teacher/placements/auto.py, which loads nothing and decides nothing.)
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from wandistiller.config.job import Job
from wandistiller.config.run_config import AUTO
from wandistiller.config.validate import block_problems
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import dtype_name, load, student_engine, with_dtype
from wandistiller.engine.ds_overrides import ACCUMULATION, MICRO, TOTAL
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK, without_block
from wandistiller.engine.preflight import config_problems
from wandistiller.engine.transfers import Topology
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.disk import on_its_disk, swap_folder
from wandistiller.planner.hardware_rates import Rates, default_rates
from wandistiller.planner.machine import Demand, Machine, demands, this_machine
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.phase_peak import moments
from wandistiller.planner.sharings import sharings
from wandistiller.planner.step_time import StepTime
from wandistiller.planner.teacher_memory import branches
from wandistiller.student.trainable import tuning_problems
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.strategies import teacher_jsons
from wandistiller.teacher.teacher_json import quantized_facts, read_placement, teacher_engine
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.utils.memoize import once_for_each
from wandistiller.utils.validation import types_of

SECTIONS = ("zero_optimization", "aio")
"""Sections of a student JSON that are chosen here, with the batch keys; all else is the run's."""
STUDENTS = "zero0 zero1 zero2 zero3 zero2_offload zero3_offload zero3_offload_all zero3_nvme".split()
"""In ds_configs/student/, the simplest first."""
EQUAL = 0.01
"""Share of a step's time within which two lower bounds count as equal; they leave out more than that."""
OWN = "as given"
"""Instead of a file's name, for an engine that is not chosen."""
NEAREST = 3
"""Number of combinations in the error message."""
HELPS = (
    "What helps: a smaller student, fewer frames, more GPUs or nodes, more CPU memory, "
    "a larger disk for the swap folder"
)


class Choice(NamedTuple):
    """A student JSON, a teacher JSON and a micro-batch, their memory, and the least seconds of a step."""

    student: str
    """Name of the file in ds_configs/student/, without .json."""
    teacher: str
    """Name of the file in ds_configs/teacher/."""
    job: Job
    takes: list[Bytes]
    """Of a rank at each moment."""
    seconds: float
    order: tuple[int, int, int]
    """The ranks of a sample, its place among the students' and the teachers' JSONs; the first are the
    simplest and move least."""

    @property
    def files(self) -> tuple[str, str]:
        """Both JSONs, where both were chosen."""
        return f"ds_configs/student/{self.student}.json", f"ds_configs/teacher/{self.teacher}.json"

    def demands(self, machine: Machine) -> list[Demand]:
        """Its demand for each kind of memory of `machine`."""
        return [d for d in demands(self.takes, machine) if d.need]

    def tightest(self, machine: Machine) -> Demand:
        """The demand of which most is missing, or least is left."""
        return max(self.demands(machine), key=lambda d: d.over)

    def why(self, machine: Machine) -> str:
        """Its numbers, in words."""
        needed = self.demands(machine)
        return (
            f"takes {' and '.join(map(str, needed))} at most; free are "
            f"{' and '.join(d.supply for d in needed)}; a step lasts {self.seconds:.3g} s at least"
        )

    def lines(self, machine: Machine) -> list[str]:
        """The log lines of a choice."""
        return [f"chosen    {self}", f"          {self.why(machine)}"]

    @property
    def settings(self) -> dict[str, Any]:
        """The engines of this run as recipe keys: file names where those suffice, else the content."""
        j, (student, teacher), number = self.job, self.files, self.job.run.context_parallel
        batch = {TOTAL: j.batch.total, MICRO: j.batch.micro}
        contents = [
            {k: v for k, v in ds.items() if k not in BATCH_KEYS} | batch
            for ds in (read_json(student), j.student_ds)
        ]
        replicas = j.batch.ranks
        same = (
            s for s in (student, *contents) if student_engine("", load(s)[1], replicas)[0] == j.student_ds
        )
        of_file = teacher_engine("", read_json(teacher), number * replicas)
        return ({"context_parallel": number} if number > 1 else {}) | {
            "deepspeed_config": next(same),
            "teacher_deepspeed_config": teacher if of_file == j.teacher_ds else j.teacher_ds,
            "prepare_batch": j.run.prepare_batch,
        }

    def __str__(self) -> str:
        batch = self.job.batch
        micro = f"micro-batch {batch.micro} x {batch.accumulation}"
        teacher = " in ".join([self.teacher, *quantized_facts(self.job.teacher_ds).values()])
        shared = f", {n} ranks a sample" if (n := self.job.run.context_parallel) > 1 else ""
        return f"student {self.student}, teacher {teacher}, {micro}{shared}"


def choices(
    job: Job, machine: Machine, rates: Rates, here: bool = False, *, keeps_sharing: bool = False
) -> list[Choice]:
    """The combinations of shipped JSONs that fit, as `fitting` sorts them; `here` as in `ranked`.

    Args:
        keeps_sharing: as many ranks as now compute each sample; else of a video any number.
    """
    jobs = [job] if keeps_sharing else sharings(job, machine)
    return fitting([one for each in jobs for one in ranked(each, machine, rates, here=here)], machine)


def each_pair(every: Iterable[Choice]) -> Iterator[Choice]:
    """The first of each pair of JSONs and number of ranks for a sample, without its other micro-batches."""
    first: dict[tuple[str, str, int], Choice] = {}
    for c in every:
        if first.setdefault((c.student, c.teacher, c.job.run.context_parallel), c) is c:
            yield c


def fitting(every: list[Choice], machine: Machine) -> list[Choice]:
    """The combinations that fit, the fastest first; of about equally fast ones the simplest first."""
    fits = [choice for choice in every if all(d.is_met for d in choice.demands(machine))]
    equal = (1 + EQUAL) * min((choice.seconds for choice in fits), default=0)
    # the largest micro-batch: fewer launches and reductions, which the bounds leave out
    return sorted(fits, key=lambda c: (max(c.seconds, equal), c.order, -c.job.batch.micro))


def ranked(
    job: Job, machine: Machine, rates: Rates, choose: tuple[bool, bool] = (True, True), here: bool = False
) -> list[Choice]:
    """Every combination at the run's global batch that its other settings allow, the fastest first.

    Args:
        choose: whether to choose the student's engine, and the teacher's placement; else it stays as it is.
        here: `machine` is this one, which must be able to build the engines.
    """
    (student, teacher), every = choose, []
    placements = list(_teachers(job, machine, here)) if teacher else [(OWN, job.teacher_ds)]
    for name, changed in _students(job, here) if student else [(OWN, job)]:
        s = STUDENTS.index(name) if student else 0
        for t, (place, ds) in enumerate(placements):
            sizes = _smaller_calls(replace(changed, teacher_ds=ds), passes=teacher)
            order = (job.run.context_parallel, s, t)
            every.append(_choice(name, place, sizes, machine, rates, order))
    return sorted(every, key=lambda c: (c.seconds, c.order))


def _choice(
    student: str,
    teacher: str,
    sizes: Iterable[Job],
    machine: Machine,
    rates: Rates,
    order: tuple[int, int, int],
) -> Choice:
    """Return the combination at the first of the sizes that fits, or else at the last, the smallest."""

    def at(job: Job) -> Choice:
        seconds = StepTime(job, machine, rates).floor()
        return Choice(student, teacher, job, moments(plan(job, machine)), seconds, order)

    def fits(choice: Choice) -> bool:
        return all(demand.is_met for demand in choice.demands(machine))

    first, *smaller = sizes
    choice = at(first)
    if not smaller or fits(choice):
        return choice
    least = at(smaller[-1])
    return next(filter(fits, map(at, smaller[:-1])), least) if fits(least) else least


def _smaller_calls(job: Job, *, passes: bool) -> Iterator[Job]:
    """Yield the run with ever smaller calls of the teacher.

    Args:
        passes: whether its JSON may be changed.
    """
    yield job
    while job.run.prepare_batch > 1:
        job = replace(job, run=replace(job.run, prepare_batch=job.run.prepare_batch // 2))
        yield job
    block = job.teacher_ds.get(BLOCK, {})
    if passes and branches(job) > 1 and read_placement(job.teacher_ds).guidance_passes == 1:
        yield replace(job, teacher_ds=job.teacher_ds | {BLOCK: block | {"guidance_passes": 2}})


def _students(job: Job, here: bool) -> Iterator[tuple[str, Job]]:
    """The run with each shipped engine that goes with its other settings, in every possible micro-batch."""
    own = {k: v for k, v in job.student_ds.items() if k not in (*BATCH_KEYS, *SECTIONS)}
    for name in STUDENTS:
        shipped = read_json(f"ds_configs/student/{name}.json")
        changed = list(_micro_batches(job, own | {k: shipped[k] for k in SECTIONS if k in shipped}))
        if not changed or tuning_problems(job.run, job.student_transformer, changed[0].student_ds):
            continue
        if not (here and config_problems("", without_block(changed[0].student_ds))):
            yield from ((name, each) for each in changed)


def _micro_batches(job: Job, ds: dict[str, Any]) -> Iterator[Job]:
    """The run with the engine `ds`, its batch cut into micro-steps in all ways that it allows."""
    share = job.batch.total // job.batch.ranks
    for micro in (m for m in (1, 2, 4, 8, 16, 32) if share % m == 0):
        with suppress(ConfigError):  # it does not go with the rest of the run's JSON
            cut = ds | {MICRO: micro, ACCUMULATION: share // micro}
            checked, batch = student_engine("", cut, job.batch.ranks)
            if not block_problems(job.run, {"batch": batch}):
                yield replace(job, student_ds=checked, batch=batch)


def _teachers(job: Job, machine: Machine, here: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The shipped placements that `machine` may gain from, with the run's own keys, the cheapest first."""
    dtype, common = dtype_name(job.teacher_ds), types_of(Placement)
    given = {key: value for key, value in job.teacher_ds.get(BLOCK, {}).items() if key in common}
    for name, ds in teachers(job.folder.config, dtype, machine.topology):
        if given:
            ds = ds | {BLOCK: ds.get(BLOCK, {}) | given}
        if read_placement(ds).weights_problems("", ds) or here and config_problems("", without_block(ds)):
            continue
        yield name, ds


@once_for_each
def teachers(config: dict[str, Any], dtype: str, topology: Topology) -> list[tuple[str, dict[str, Any]]]:
    """The shipped teacher JSONs that `auto` compares, checked, those with the cheapest transfers first.

    Args:
        config: the teacher's.
        dtype: its precision.
    """
    candidates = []
    for name in teacher_jsons():
        with suppress(ConfigError):  # a library that it needs is not installed
            shipped = with_dtype(read_json(f"ds_configs/teacher/{name}.json"), dtype)
            ds = teacher_engine(name, shipped, topology.ranks)
            if (placement := read_placement(ds)).is_candidate(ds, topology):
                ways = {transfer.way for transfer in placement.traffic(config, ds, topology)}
                slow = [way in ways for way in ("disk", "pcie", "network", "link")]
                cost = (placement.on_cpu and topology.accelerator, *slow, placement.on_cpu)
                candidates.append((cost, name, ds))
    return [(name, ds) for _, name, ds in sorted(candidates, key=lambda row: row[:2])]


def resolved(stages: list[Job]) -> list[Job]:
    """Resolve what the stages of a recipe leave at `auto`. Collective."""
    done: list[Job] = []
    for job in stages:
        done.append(replace(resolve_auto(job), previous=done[-1] if done else None))
    return done


def resolve_auto(job: Job) -> Job:
    """Resolve what `job` leaves at `auto` into JSONs, written to OUTPUT/resolved as any others. Collective.

    Raises:
        ConfigError: nothing fits.
    """
    if not any(left_open(job)):
        return job
    swap = swap_folder(job, shipped=True)
    machine = on_its_disk(this_machine(swap), job, swap)
    best = chosen(job, machine, here=True)
    for line in best.lines(machine):
        collectives.log0("%s", line)
    return best.job


def left_open(job: Job) -> tuple[bool, bool]:
    """Return whether the student's engine is `auto`, and whether the teacher's placement is."""
    return job.run.deepspeed_config == AUTO, read_placement(job.teacher_ds).name == AUTO


def chosen(job: Job, machine: Machine, here: bool = False) -> Choice:
    """The fastest combination that fits `machine`, of what `job` leaves at `auto`.

    Args:
        here: `machine` is this one; engines that it cannot build, such as NVMe without libaio, are left out.
    Raises:
        ConfigError: nothing fits; it names the nearest combinations, free memory, and what helps.
    """
    rates = default_rates(machine.device_size, machine.device_name)
    every = ranked(job, machine, rates, left_open(job), here)
    if fits := fitting(every, machine):
        return fits[0]
    near = list(islice(each_pair(sorted(every, key=lambda c: c.tightest(machine).over)), NEAREST))
    needs = "; ".join(f"{choice} would need {choice.tightest(machine)}" for choice in near)
    free = ", ".join(d.supply for d in near[0].demands(machine))
    half = ", or a teacher in bfloat16, which takes half" if dtype_name(job.teacher_ds) == "float32" else ""
    raise ConfigError(
        f"Nothing that could be chosen fits. Free are {free}. Nearest come: {needs}. {HELPS}{half}."
    )
