"""`wandistiller plan`: memory, disk and least time of a run, on this machine or one described by flags."""

from dataclasses import replace
from pathlib import Path

from wandistiller.cli.flags import PlanFlags
from wandistiller.cli.plan_report import Planned, Recommended, cost, duration, report, verdict
from wandistiller.config.job import Job
from wandistiller.config.recipe import recipe_of
from wandistiller.config.stages import read_jobs
from wandistiller.distributed import collectives
from wandistiller.distributed.device import count as number_of_gpus
from wandistiller.distributed.device import emulates_bf16
from wandistiller.planner.compiling import with_kernels
from wandistiller.planner.disk import fetch_problems, on_its_disk, swap_folder
from wandistiller.planner.free_memory import with_free_memory
from wandistiller.planner.machine import Machine, this_machine
from wandistiller.planner.resolve_auto import choices, chosen, helps, left_open
from wandistiller.planner.time import Rates, Times, usual_rates
from wandistiller.utils.errors import ConfigError, folder_problems, problem
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB
from wandistiller.utils.validation import types_of, value_problems

MACHINE = ("nodes", "gpus", "gpu_memory", "gpu_name", "host_memory", "disk")
"""Flags that describe a machine other than this one."""
FITTING = "settings that fit, the simplest first, which --recommend FILE writes into a recipe:"


def run(flags: PlanFlags) -> None:
    """Read the run as `train` does and print its plan; nothing is written but the recommended recipe."""
    launched = collectives.world_size() > 1
    if launched:
        collectives.init()
    lines: list[str] = []
    try:
        with collectives.raise_on_all_ranks():
            plan_lines(flags, lines)
    finally:  # where nothing fits, they say why
        if lines:
            collectives.show(*lines)
    if launched:
        collectives.destroy()


def plan_lines(flags: PlanFlags, lines: list[str]) -> None:
    """Add to `lines` what is to be printed, and write the recommended recipe if a file is named. Collective.

    Raises:
        ConfigError: with every problem of the run; or it does not fit, and no recipe that does was written.
    """
    if problems := _problems(flags):
        raise ConfigError(*problems)
    values = read_json(flags.recipe) if flags.recipe else {}
    machine, here = described(flags), all(getattr(flags, key) is None for key in MACHINE)
    defaults = {} if "output_dir" in values else {"output_dir": "runs/plan"}
    settings = defaults | flags.settings | {"resume": "never"}
    recipe = recipe_of(values, settings, flags.recipe)
    jobs = read_jobs(recipe, machine.ranks, here=here, emulated=emulates_bf16() if here else None)
    fetch_problems(jobs[0])  # says what the run will fetch
    rates, price = usual_rates(machine), flags.price_per_gpu_hour
    written, planned, total = values | flags.settings, [], 0.0
    for job in jobs:
        before = planned[-1].job if planned else None
        text, stage = _of_run(replace(job, previous=before), machine, rates, here, price)
        planned.append(stage)
        lines += [*([f"==== stage {job.stage}", ""] if job.stage else []), *text]
        total += Times(stage.job, machine, rates).whole()
    if len(jobs) > 1:
        lines.append(f"all {len(jobs)} stages: about {duration(total)} for their steps and rollouts")
    if len(jobs) > 1 and price is not None:
        lines.append(f"they cost about {cost(total, machine, price)}")
    best = {stage.job.stage: stage.fits[0] for stage in planned if stage.fits}
    lines += verdict(planned)
    if file := flags.recommend:
        if len(best) < len(planned):
            raise ConfigError(f"Nothing fits that could be recommended. {helps(jobs[0])}.")
        lines += Recommended(recipe.runs, best, written).write(file, machine)
    elif any(stage.short for stage in planned):
        raise ConfigError("The run does not fit this machine; the last lines of the plan say what helps.")


def _of_run(
    job: Job, machine: Machine, rates: Rates, here: bool, price: float | None
) -> tuple[list[str], Planned]:
    """Return lines on one run, and its plan, with `auto` resolved. Collective."""

    def with_disk(job: Job, shipped: bool) -> Machine:
        return on_its_disk(machine, job, swap_folder(job, shipped=shipped) if here else None)

    lines: list[str] = []
    if any(left_open(job)):
        choice = chosen(job, with_disk(job, True), here)
        job, lines = choice.job, [*choice.lines(machine), ""]
    placed, of_memory = with_free_memory(job, with_disk(job, False))
    _, of_kernels = with_kernels(placed, machine, here=here)  # times are of eager blocks: no run was compiled
    lines += [*of_memory, *of_kernels, ""] if of_memory or of_kernels else []
    text, short = report(placed, with_disk(job, False), Times(placed, machine, rates), here, price)
    room = with_disk(job, True)
    fits = [*choices(job, room, here=here, by_teacher=True)]
    lines += [*text, "", FITTING if fits else "no settings fit here"]
    for choice in fits:
        changes = choice.job.teacher.weights not in (None, job.teacher.weights)
        step = duration(Times(with_free_memory(choice.job, room)[0], machine, rates).step())
        end = ", which changes the teacher's outputs" * changes
        lines.append(f"  {step:>8} a step: {choice}{end}")
    return lines, Planned(placed, room, short, fits)


def _problems(flags: PlanFlags) -> list[str]:
    named = {key: value for key, value in vars(flags).items() if value is not None}
    problems = value_problems("command line", named, types_of(PlanFlags))
    if flags.gpus == 0 and flags.gpu_memory is not None:
        remedy = "`--gpus 0` has none; remove one of the two."
        problems.append(problem("command line", "gpu_memory", flags.gpu_memory, remedy))
    if flags.recommend and flags.recommend.exists():
        remedy = "It is there already, and is not overwritten. Name a new file, or delete it."
        problems.append(problem("command line", "recommend", flags.recommend, remedy))
    return problems + (folder_problems("recommend", flags.recommend.parent) if flags.recommend else [])


def described(flags: PlanFlags) -> Machine:
    """Build the machine that the flags describe; values left out are this machine's. Collective.

    A node runs as many ranks on CPUs as this one.

    Raises:
        ConfigError: GPUs whose memory neither the flags nor this machine give.
    """
    here = this_machine(Path())
    launched = collectives.world_size() > 1
    gpus, none = flags.gpus, here.device_free is None
    if gpus is None:
        gpus = here.ranks_on_node if launched or none else number_of_gpus()
        gpus *= not (none and flags.gpu_memory is None)
    if gpus and flags.gpu_memory is None and none:
        remedy = "There is no GPU here: write `--gpu_memory` too."
        raise ConfigError(problem("command line", "gpus", gpus, remedy))

    def free(key: str, here: int | None) -> int | None:
        return here if (gib := getattr(flags, key)) is None else int(gib * GIB)

    device, total = free("gpu_memory", here.device_free), here.device_total
    total = total if gpus and flags.gpu_memory is None else None
    host, disk = free("host_memory", here.host_free), free("disk", here.disk_free)
    on_node = gpus or here.ranks_on_node
    nodes = flags.nodes or (-(-here.ranks // here.ranks_on_node) if not flags.gpus else 1)
    name = flags.gpu_name or ("" if total is None else here.device_name)
    memory = device if gpus else None, host, disk
    return Machine(*memory, on_node * nodes, on_node, device_total=total, device_name=name)
