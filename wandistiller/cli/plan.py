"""`wandistiller plan`: memory, disk and least time of a run, on this machine or one described by flags."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from wandistiller.cli.flags import PlanFlags
from wandistiller.cli.plan_report import cost, duration, report
from wandistiller.config.job import Job
from wandistiller.config.run_config import ONLY_FLAGS, RunConfig
from wandistiller.config.stages import STAGES, in_stages, placing, read_jobs, runs_of
from wandistiller.config.summary import is_emulated
from wandistiller.distributed import collectives
from wandistiller.distributed.device import count as number_of_gpus
from wandistiller.engine.ds_overrides import EngineOverrides
from wandistiller.engine.kernels import emulates_bf16
from wandistiller.planner import hardware_rates
from wandistiller.planner.disk import on_its_disk, swap_folder
from wandistiller.planner.hardware_rates import Rates
from wandistiller.planner.machine import Machine, this_machine
from wandistiller.planner.other_work import whole_run
from wandistiller.planner.resolve_auto import HELPS, Choice, choices, chosen, left_open
from wandistiller.planner.step_time import StepTime
from wandistiller.utils.errors import ConfigError, folder_problems, problem
from wandistiller.utils.files import read_json, write_json
from wandistiller.utils.system_memory import GIB

MACHINE = ("nodes", "gpus", "gpu_memory", "gpu_name", "host_memory", "disk")
"""Flags that describe a machine other than this one."""
LISTED = 5
"""Number of combinations printed."""


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
        ConfigError: with every problem of the run, or if no combination fits that could be recommended.
    """
    if problems := _problems(flags):
        raise ConfigError(*problems)
    values = read_json(flags.recipe) if flags.recipe else {}
    machine, here = described(flags), all(getattr(flags, key) is None for key in MACHINE)
    defaults = {} if "output_dir" in values else {"output_dir": "runs/plan"}
    settings = defaults | flags.settings | {"resume": "never"}
    runs = runs_of(values, settings, flags.recipe, emulates_bf16() if here else None)
    best, total = {}, 0.0
    with placing(flags.recipe, flags.settings):
        jobs = read_jobs(runs, machine.ranks, here=here)
    slow = here and any(map(is_emulated, jobs))
    usual = hardware_rates.default_rates(machine.device_size, machine.device_name, emulated=slow)
    rates = hardware_rates.override_rates(usual, flags.rates)
    if flags.measure:
        dtype = jobs[0].student_engine.dtype
        measured = replace(rates, **hardware_rates.measure_rates(swap_folder(jobs[0]), dtype))
        rates = hardware_rates.override_rates(measured, flags.rates)  # what is given is not measured
        lines += ["not measured: link and network, see `wandistiller doctor --measure`", ""]
    given = values | flags.settings
    before, keeps = None, _keeps_sharing(given)
    for job in jobs:
        job = replace(job, previous=before)
        text, before, best[job.stage] = _of_run(job, machine, rates, here, flags.price_per_gpu_hour, keeps)
        lines += [*([f"==== stage {job.stage}", ""] if job.stage else []), *text]
        total += whole_run(before, machine, rates)
    if len(jobs) > 1:
        what = "for their steps, the work before these and pictures"
        lines.append(f"all {len(jobs)} stages: at least {duration(total)} {what}")
    if len(jobs) > 1 and (price := flags.price_per_gpu_hour) is not None:
        lines.append(f"they cost at least {cost(total, machine, price)}")
    if file := flags.recommend:
        lines += _recommend(file, runs, {"output_dir": f"runs/{file.stem}"} | given, best, machine)


def _of_run(
    job: Job, machine: Machine, rates: Rates, here: bool, price: float | None, keeps: bool
) -> tuple[list[str], Job, list[Choice]]:
    """Return lines on one run, the run with `auto` resolved, and combinations that fit. Collective.

    Args:
        keeps: no other number of ranks computes each sample.
    """
    lines: list[str] = []

    def with_disk(job: Job, shipped: bool) -> Machine:
        return on_its_disk(machine, job, swap_folder(job, shipped=shipped) if here else None)

    if any(left_open(job)):
        choice = chosen(job, with_disk(job, True), here)
        job, lines = choice.job, [*choice.lines(machine), ""]
    lines += [*report(job, with_disk(job, False), rates, here, price), ""]
    best = [*islice(choices(job, with_disk(job, True), here=here, keeps_sharing=keeps), LISTED)]
    simplest = "shipped JSONs that fit, the simplest first:"
    lines.append(simplest if best else "no combination of the shipped JSONs fits")
    own, tried = (
        run.teacher.weights or run.teacher.engine.precision for run in (job, best[0].job if best else job)
    )
    if tried != own:
        change = ", which changes its outputs," if best[0].job.teacher.weights else ""
        none = f"none fits with the teacher's weights in {own}"
        lines[-1] = f"{none}. In {tried}{change} these fit, the simplest first:"
    for choice in best:
        seconds = StepTime(choice.job, machine, rates).floor()
        lines.append(f"  {seconds:>9.3f} s a step at least: {choice}")
    return lines, job, best


def _keeps_sharing(given: dict[str, Any]) -> bool:
    """Return whether the recipe, one of its stages or a flag says how many ranks compute each sample."""
    return any("context_parallel" in part for part in (given, *given.get(STAGES, ())))


def _recommend(
    file: Path,
    runs: dict[str, RunConfig],
    given: dict[str, Any],
    best: dict[str, list[Choice]],
    machine: Machine,
) -> list[str]:
    """Write the recipe with the simplest of `best` on rank 0, and return the lines that say so.

    Args:
        runs, best: by stage.
        given: values of the recipe and of the flags, as the user wrote them.
    Raises:
        ConfigError: nothing fits.
    """
    if not all(best.values()):
        raise ConfigError(f"Nothing fits that could be recommended. {HELPS}, or a teacher in bfloat16.")
    if collectives.rank() == 0:
        own = {stage: _without_engines(run, given) | best[stage][0].settings for stage, run in runs.items()}
        write_json(file, own[""] if "" in own else in_stages(own, given))
    return [f"wrote {file}", f"next: {_next_command(file, machine)}"]


def _next_command(file: str | Path, machine: Machine) -> str:
    train = f"wandistiller train --recipe {shlex.quote(str(file))}"
    if machine.ranks == 1 and machine.device_free is None:
        return train
    if machine.ranks > machine.ranks_on_node:
        return f"HOSTFILE=launch/hostfile bash launch/deepspeed.sh{train.removeprefix('wandistiller')}"
    return f"deepspeed --num_gpus {machine.ranks} --module {train}"


def _without_engines(config: RunConfig, given: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `config`, shorthands written out, without the settings that the engines' JSONs hold."""
    defaults = asdict(RunConfig())
    in_jsons = {"teacher_dtype", *ONLY_FLAGS, *(f.name for f in fields(EngineOverrides))}
    places = {key: given.get(key, defaults[key]) for key in ("output_dir", "cache_dir", "resume")}
    recipe = asdict(config) | places
    return {k: value for k, value in recipe.items() if value != defaults[k] and k not in in_jsons}


def _problems(flags: PlanFlags) -> list[str]:
    def wrong() -> Iterator[tuple[str, str]]:
        for key, least in {"gpus": 0, "nodes": 1}.items():
            if (number := getattr(flags, key)) is not None and number < least:
                yield key, f"Write {least} or more."
        if flags.gpus == 0 and flags.gpu_memory is not None:
            yield "gpu_memory", "`--gpus 0` has none; remove one of the two."
        if flags.measure and (flags.gpus, flags.gpu_memory) != (None, None):
            yield "measure", "It measures this machine, not one that is described: give --rates."
        if flags.price_per_gpu_hour is not None and not 0 <= flags.price_per_gpu_hour < 1e6:
            yield "price_per_gpu_hour", "Write a price of 0 or more."
        for key in ("gpu_memory", "host_memory", "disk"):
            if (gib := getattr(flags, key)) is not None and not 0 < gib < 1e7:
                yield key, "Write GiB over 0."
        if flags.recommend and flags.recommend.exists():
            yield "recommend", "It is there already, and is not overwritten. Name a new file, or delete it."

    problems = [problem("command line", key, getattr(flags, key), remedy) for key, remedy in wrong()]
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
    own = device if gpus else None, host, disk, on_node * nodes, on_node
    return Machine(*own, device_total=total, device_name=name)
