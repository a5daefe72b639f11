"""Decides `auto`: the simplest shipped JSONs that fit for student and teacher, and the micro-batch.

`plan` compares the same combinations. (The word `auto` in a teacher JSON is read by
teacher/placements/auto.py, which loads nothing and decides nothing.)
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import shipped_json, student_engine
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_overrides import ACCUMULATION, MICRO, TOTAL
from wandistiller.engine.ds_schema import BATCH_KEYS
from wandistiller.engine.engine_config import RECOMPUTED
from wandistiller.engine.preflight import config_problems
from wandistiller.engine.zero_memory import Bytes, Topology
from wandistiller.planner.compiling import with_kernels
from wandistiller.planner.disk import on_its_disk, swap_folder
from wandistiller.planner.free_memory import BUT_LAST, with_free_memory
from wandistiller.planner.machine import Demand, Machine, demands, moments, this_machine
from wandistiller.planner.peak_memory import plan
from wandistiller.student.trainable import tuning_problems
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.quantized import Weights, missing_problems
from wandistiller.teacher.strategies import teacher_jsons
from wandistiller.teacher.teacher_json import AUTO, quantized_facts, read_placement, with_keys
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.memoize import once_for_each

SECTIONS = ("zero_optimization", "aio")
"""Sections of a student JSON that are chosen here, with the batch keys; all else is the run's. Of a JSON that
keeps activations in CPU memory its RECOMPUTED too."""
STUDENTS = (
    ("zero2", "zero1", "zero0", "zero3"),
    ("zero3_offload", "zero2_offload"),
    ("lora_wan_clips",),
    ("zero3_offload_all",),
    ("zero3_nvme",),
)
"""In ds_configs/student/, the simplest first: those that keep all on the accelerators, that give away the
optimizer, then activations or the weights too, then all to a disk. The others there have the sections of one
of these. A single rank divides nothing and takes `zero0` first. Stage 3 computes while gradients are on their
way to CPU memory, and stage 2 waits (deepspeed 0.19.8)."""
TEACHERS = (
    "replicated host_cpu streamed sharded_node sharded zero_inference_cpu_node zero_inference_cpu files "
    "zero_inference_nvme"
).split()
"""In ds_configs/teacher/, the simplest first: weights that stay where they compute, that arrive once for all
micro-steps, at every call from other ranks or CPU memory, and from a disk. What computes on the CPU beside
GPUs comes last, and before it any other that is a candidate."""
FORMATS = (None, "int8", "nf4")
"""Formats of the teacher's weights in the shipped JSONs, the exact one first."""
ENOUGH = 6000
"""Tokens of a micro-step, as of four images of 480x832, beside which what moves in each counts little."""
AS_IS = "as given"
"""Instead of a file's name, for an engine that is not chosen."""
NEAREST = 3
"""Number of combinations in the error message."""


class Choice(NamedTuple):
    """A student JSON, a teacher JSON and a micro-batch, and their memory."""

    student: str
    """Name of the file in ds_configs/student/, without .json."""
    teacher: str
    """Name of the file in ds_configs/teacher/."""
    job: Job
    takes: list[Bytes]
    """Of a rank at each moment."""

    def demands(self, machine: Machine) -> list[Demand]:
        return [d for d in demands(self.takes, machine) if d.need]

    def fits(self, machine: Machine) -> bool:
        """Return whether `machine` has room for it, and for a reserve."""
        return all(d.is_met for d in self.demands(machine))

    def tightest(self, machine: Machine) -> Demand:
        """The demand of which most is missing, or least is left."""
        return max(self.demands(machine), key=lambda d: d.over)

    def lines(self, machine: Machine) -> list[str]:
        needed = self.demands(machine)
        free = " and ".join(d.supply for d in needed)
        why = f"takes {' and '.join(map(str, needed))} at most; available: {free}"
        return [f"chosen    {self}", f"          {why}"]

    @property
    def settings(self) -> dict[str, Any]:
        """Both chosen engines as recipe keys: file names where those suffice, else the content."""
        j, student = self.job, f"ds_configs/student/{self.student}.json"
        teacher = f"ds_configs/teacher/{self.teacher}.json"
        batch = {TOTAL: j.batch.total, MICRO: j.batch.micro}
        content = j.student_engine.without(*BATCH_KEYS).replaced(**batch).as_written
        is_shipped = student_engine(shipped_json(student), j.batch.ranks) == j.student_engine
        placement = read_placement(shipped_json(teacher), j.batch.ranks * j.run.context_parallel)
        return {
            "deepspeed_config": student if is_shipped else content,
            "teacher_deepspeed_config": teacher if placement == j.teacher else j.teacher.engine.as_written,
        }

    def __str__(self) -> str:
        batch = self.job.batch
        micro = f"micro-batch {batch.micro} x {batch.accumulation}"
        teacher = " in ".join([self.teacher, *quantized_facts(self.job.teacher).values()])
        return f"student {self.student}, teacher {teacher}, {micro}"


class Pair(NamedTuple):
    """A student JSON and a teacher JSON, by their names as in `Choice`."""

    student: str
    teacher: str
    sizes: list[Job]
    """The run with both, in every micro-batch that it allows, the smallest first."""
    group: int
    """Place of the student's group in STUDENTS."""

    def choice(self, job: Job, machine: Machine, *, coding: bool = True) -> Choice:
        """Plan the pair as `job`, one of its sizes, has it; `coding` as in `plan`."""
        return Choice(self.student, self.teacher, job, moments(plan(job, machine, coding=coding)))

    def largest(self, machine: Machine) -> Choice | None:
        """The largest micro-batch that fits; what is quickly planned is tried first."""
        best = None
        for size in self.sizes:
            if not self.choice(size, machine, coding=False).fits(machine):
                break
            if not (choice := self.choice(size, machine)).fits(machine):
                break
            best = choice
        return best


def choices(
    job: Job,
    machine: Machine,
    choose: tuple[bool, bool] = (True, True),
    here: bool = False,
    *,
    exact: bool = False,
    by_teacher: bool = False,
) -> Iterator[Choice]:
    """Yield each pair of shipped JSONs that fits, the simplest first, at the largest micro-batch that does.

    Those that keep the format of the teacher's weights come before those of each other of `formats`. Within a
    format the groups of STUDENTS follow each other, and in each the teachers, and of each teacher the
    students; but pairs that have no room for ENOUGH tokens come after those of their group that have it.

    Args:
        choose: as in `pairs`, and `here` too.
        exact: as in `formats`.
        by_teacher: of each teacher JSON the first alone.
    """
    seen: set[str] = set()
    for weights in formats(job, choose, exact=exact):
        for choice in _fitting(pairs(job, machine, choose, here, weights), machine, seen):
            if choice.teacher not in seen:
                yield choice
            if by_teacher:
                seen.add(choice.teacher)


def _fitting(every: list[Pair], machine: Machine, without: set[str]) -> Iterator[Choice]:
    """Yield the largest micro-batch that fits of each pair, in the order of `choices`.

    Args:
        without: teachers of which no more pairs are planned.
    """
    for _, group in groupby(every, key=lambda pair: pair.group):
        few = []
        for pair in (pair for pair in group if pair.teacher not in without):
            size, largest = pair.sizes[0].size, pair.sizes[-1].batch.micro
            tokens = pair.sizes[0].folder.tokens(size.height, size.width, size.num_frames)
            if choice := pair.largest(machine):
                if choice.job.batch.micro >= min(ceil(ENOUGH / tokens), largest):
                    yield choice
                else:
                    few.append(choice)
        yield from sorted(few, key=lambda choice: -choice.job.batch.micro)


def formats(job: Job, choose: tuple[bool, bool] = (True, True), *, exact: bool = False) -> list[Weights]:
    """Return the formats of the teacher's weights in which it is tried: first the run's own, then the exact.

    Args:
        choose: as in `pairs`.
        exact: without those that change the teacher's outputs, which `auto` never chooses.
    """
    others = FORMATS[:1] if exact else FORMATS
    return list(dict.fromkeys([job.teacher.weights, *(others if choose[1] else ())]))


def pairs(
    job: Job,
    machine: Machine,
    choose: tuple[bool, bool] = (True, True),
    here: bool = False,
    weights: Weights = None,
) -> list[Pair]:
    """The combinations at the run's global batch that its other settings allow, the simplest first.

    Args:
        choose: whether to choose the student's engine, and the teacher's placement; else it stays as it is.
        here: `machine` is this one, which must be able to build the engines.
        weights: format of the teacher's, if it is chosen.
    """
    student, teacher = choose
    placements = [(AS_IS, job.teacher)]
    if teacher:
        placements = [*placements_like(job.teacher, machine, here, weights)]
    alone = machine.ranks == 1
    names = [sorted(group, key=lambda name: alone and name != "zero0") for group in STUDENTS]
    groups = [[*_students(job, machine, group, here)] for group in names] if student else [[(AS_IS, [job])]]
    return [
        Pair(name, place, [replace(size, teacher=placement) for size in sizes], number)
        for number, group in enumerate(groups)
        for place, placement in placements
        for name, sizes in group
    ]


def _students(
    job: Job, machine: Machine, names: Iterable[str], here: bool
) -> Iterator[tuple[str, list[Job]]]:
    """The run with each of these engines that goes with its other settings, in every possible micro-batch."""
    unchosen = job.student_engine.without(*BATCH_KEYS, *SECTIONS)
    tuned = replace(job.run, lora=None)  # of its checks, which take a second, none is about the engine
    for name in names:
        shipped = shipped_json(f"ds_configs/student/{name}.json").raw
        sections = [RECOMPUTED] if shipped[RECOMPUTED].get("cpu_checkpointing") else []
        if sections and not machine.topology.accelerator:
            continue  # activations are in CPU memory anyway
        sections += [key for key in SECTIONS if key in shipped]
        sizes = [*_micro_batches(job, unchosen.replaced(**{key: shipped[key] for key in sections}))]
        if not sizes or tuning_problems(tuned, job.student_transformer, sizes[0].student_engine):
            continue
        if not (here and config_problems(sizes[0].student_engine)):
            yield name, sizes


def _micro_batches(job: Job, json: DeepSpeedJson) -> Iterator[Job]:
    """The run with this engine, its batch cut into micro-steps in all ways that it allows."""
    share = job.batch.total // job.batch.ranks
    for micro in (m for m in (1, 2, 4, 8, 16, 32) if share % m == 0):
        with suppress(ConfigError):  # it does not go with the rest of the run's JSON
            cut = json.replaced(**{MICRO: micro, ACCUMULATION: share // micro})
            yield replace(job, student_engine=student_engine(cut, job.batch.ranks))


def placements_like(
    like: Placement, machine: Machine, here: bool, weights: Weights
) -> Iterator[tuple[str, Placement]]:
    """The shipped placements that `machine` may gain from, with the keys of `like`, the simplest first.

    In its own format every placement that holds it, in another the shipped JSONs that name it.
    """
    engine, is_same = like.engine, weights == like.weights
    keys = {key for key in Placement.keys() if is_same or key != "weights"}
    block = {key: value for key, value in engine.block.items() if key in keys}
    for name, placement in teachers(engine.precision, machine.topology, None if is_same else weights):
        placement = with_keys(placement, **block)
        lacks = missing_problems(engine, weights) + config_problems(placement.engine) if here else []
        if not placement.weights_problems() + lacks:
            yield name, placement


@once_for_each
def teachers(dtype: str, topology: Topology, weights: Weights = None) -> list[tuple[str, Placement]]:
    """The shipped teacher JSONs that `auto` compares, checked, the simplest first.

    Args:
        dtype: the teacher's precision.
        weights: format of its weights, if they are quantised.
    """
    candidates, late = [], []
    for name in dict.fromkeys([*TEACHERS, *teacher_jsons()]):
        with suppress(ConfigError):  # a library that it needs is not installed
            shipped = shipped_json(f"ds_configs/teacher/{name}.json").in_precision(dtype)
            placement = read_placement(shipped, topology.ranks)
            if placement.is_candidate(topology) and placement.weights == weights:
                place = late if placement.on_cpu and topology.accelerator else candidates
                place.append((name, placement))
    return candidates + late


def decide_auto(stages: list[Job]) -> list[Job]:
    """Resolve what the stages of a recipe leave at `auto`. Collective."""
    done: list[Job] = []
    for job in stages:
        done.append(replace(resolve_auto(job), previous=done[-1] if done else None))
    return done


def resolve_auto(job: Job) -> Job:
    """Resolve what `job` leaves at `auto` into JSONs, written to OUTPUT/resolved as any others. Collective.

    Raises:
        ConfigError: on all ranks; nothing fits, or their nodes can build different JSONs.
    """
    engine, is_chosen, lines = job.student_engine, any(left_open(job)), []
    is_open = engine.is_offload_open or engine.is_compile_open or engine.block.get(BUT_LAST) == "auto"
    if not (is_chosen or is_open or engine.kernels.compile):
        return job
    swap = swap_folder(job, shipped=is_chosen)
    machine = on_its_disk(this_machine(swap), job, swap)
    if is_chosen:
        best = _chosen_by_all(job, machine)
        job, lines = best.job, best.lines(machine)
    job, of_memory = with_free_memory(job, machine)
    job, of_kernels = with_kernels(job, machine, here=True)
    for line in [*lines, *of_memory, *of_kernels]:
        collectives.log0("%s", line)
    return job


def _chosen_by_all(job: Job, machine: Machine) -> Choice:
    with collectives.raise_on_all_ranks():
        best = chosen(job, machine, here=True)
    if len(every := dict.fromkeys(collectives.gather_objects(f"{best}"))) > 1:
        remedy = "`wandistiller doctor`, started there, says what some lack; install it, or name both JSONs."
        raise ConfigError(f"`auto` differs, as nodes can build different JSONs: {'; '.join(every)}. {remedy}")
    return best


def left_open(job: Job) -> tuple[bool, bool]:
    """Return whether the student's engine is `auto`, and whether the teacher's placement is."""
    return job.student_engine.is_open, job.teacher.name == AUTO


def chosen(job: Job, machine: Machine, here: bool = False) -> Choice:
    """The simplest combination that fits `machine`, of what `job` leaves at `auto`; `here` as in `pairs`.

    Raises:
        ConfigError: nothing fits; it names the nearest combinations, free memory, and what helps.
    """
    choose = left_open(job)
    if best := next(choices(job, machine, choose, here, exact=True), None):
        return best
    every = [p for w in formats(job, choose, exact=True) for p in pairs(job, machine, choose, here, w)]
    smallest = (pair.choice(pair.sizes[0], machine) for pair in every)
    near = sorted(smallest, key=lambda choice: choice.tightest(machine).over)[:NEAREST]
    needs = "; ".join(f"{choice} would need {choice.tightest(machine)}" for choice in near)
    free = ", ".join(d.supply for d in near[0].demands(machine))
    raise ConfigError(f"No JSONs of ds_configs/ fit. Available: {free}. The nearest: {needs}. {helps(job)}.")


def helps(job: Job) -> str:
    """Say what makes room for a run where no JSON does."""
    text = "What helps: " if job.run.lora else "What helps: adapters (`--lora`) or a smaller student, "
    text += "fewer frames, several GPUs for each sample (`--context_parallel`), `--prepare_batch 1`, more"
    return text + " GPUs or nodes, more CPU memory, a larger disk for the swap folder"
