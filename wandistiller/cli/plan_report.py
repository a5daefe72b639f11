"""Lines that `wandistiller plan` prints: memory by phase, the step, the whole run, and the verdict.

That says whether every stage fits, the flags with which it does, and the recipe that does.
"""

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from wandistiller.config.job import Job
from wandistiller.config.recipe import in_stages
from wandistiller.config.run_config import ONLY_FLAGS, RunConfig
from wandistiller.config.summary import precision_lines, summary
from wandistiller.distributed import collectives
from wandistiller.engine.ds_overrides import OVERRIDES
from wandistiller.planner.disk import DiskUse, disk_demands, written
from wandistiller.planner.machine import Demand, Machine, PhasePeak, demands, moments, most
from wandistiller.planner.passes import base_sweeps
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.resolve_auto import Choice, choices, helps
from wandistiller.planner.teacher_memory import teacher_bytes
from wandistiller.planner.time import Times
from wandistiller.utils.files import write_json
from wandistiller.utils.system_memory import GIB

KINDS = {
    "GPU": lambda b: b.device + b.transient,
    "CPU memory of a rank": lambda b: b.host,
    "CPU memory that the ranks of a node share": lambda b: b.node,
    "disk": lambda b: b.disk,
}
"""Kind of memory -> its bytes in a part of a phase."""
LORAS = {
    (False, False): "1x16_wan2.1_14b_lora",
    (False, True): "1x16_wan2.1_14b_lora",
    (True, False): "1x16_wan2.2_a14b_lora",
    (True, True): "1x24_wan2.2_i2v_a14b_lora",
}
"""Whether the teacher has two experts, whether it is given frames -> a recipe in ds_configs/machines/."""
AUTO = "--deepspeed_config auto"


def report(
    job: Job, machine: Machine, times: Times, here: bool, price: float | None
) -> tuple[list[str], list[Demand]]:
    """Describe the run, a line each, and list what does not fit.

    Args:
        here: whether the machine is this one, whose disks can be examined.
        price: of a GPU for an hour.
    """
    m, gpus = machine, "no GPU"
    if m.device_free is not None:
        gpus = f"{m.ranks_on_node} x {m.device_free / GIB:.0f} GiB of GPU memory"
    phases, files = plan(job, machine), written(job, accelerator=m.device_free is not None)
    *memory, disk = demands(moments(phases), m)
    swapped = m.ranks_on_node * most(phases).disk
    disks = disk_demands(job, m, swapped) if here else [disk._replace(need=swapped + files.whole)]
    needed = [demand for demand in (*memory, *disks) if demand.need]
    lines = [
        f"machine   {m.ranks // m.ranks_on_node} node(s), each with {gpus}, "
        f"{m.host_free / GIB:.0f} GiB of CPU memory, {m.disk_free / GIB:.0f} GiB of disk; {m.ranks} rank(s)",
        *summary(job)[:-1],
        *(precision_lines(job) if here else []),
        "",
        *_table(phases, machine),
        f"files on disk: {files}",
        "",
        *_step(job, times),
        "",
        *_whole_run(job, machine, times, price),
        *_fit(job, needed, files),
    ]
    return lines, [demand for demand in needed if not demand.is_met]


def duration(seconds: float) -> str:
    """Hours, minutes, seconds or milliseconds, whichever says it in a short number."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"


def _table(phases: dict[str, PhasePeak], machine: Machine) -> list[str]:
    """For each kind of memory, the parts of every phase at the moment of its peak of that kind."""
    lines = []
    for kind, taken in KINDS.items():
        columns = {name: phase.parts(taken) for name, phase in phases.items()}
        rows = dict.fromkeys(part for column in columns.values() for part, n in column.items() if n)
        if rows:
            lines += ["", f"{f'{kind}, GiB':<56}{''.join(f'{name:>12}' for name in phases)}"]
            lines += [_row(part, (column.get(part, 0) for column in columns.values())) for part in rows]
            lines.append(_row("at its peak", (taken(phase.peak()) for phase in phases.values())))
    reserves = ", ".join(f"{d.reserve / GIB:.2f} GiB {d.where}" for d in demands([], machine))
    return [*lines[1:], "", f"reserve: {reserves}, for other programs, file caches and gaps between tensors"]


def _row(name: str, numbers: Iterable[int]) -> str:
    return f"{name:<56}{''.join(f'{n / GIB:>12.2f}' if n else f'{chr(45):>12}' for n in numbers)}"


def _step(job: Job, times: Times) -> list[str]:
    computing = {role: seconds for role, seconds in times.computing().items() if seconds}
    parts = ", ".join(f"{duration(seconds)} the {role}" for role, seconds in computing.items())
    memory = f" and {times.rates.tbytes:.3g} TB/s" * (times.rates.tbytes < inf)
    rate = f"counted with {times.rates.tflops:.3g} TFLOP/s{memory}"
    parts += f", {duration(times.updating())} the optimizer"
    lines = [f"a step takes about {duration(times.step())}, {rate}: {parts}"]
    if moving := times.moving():
        sweeps = base_sweeps(job)
        each = ", ".join(f"{number:.3g} for {purpose}" for purpose, number in sweeps.items())
        often = f" {sum(sweeps.values()):.3g} times ({each})" if sweeps else ""
        lines.append(f"meanwhile the teacher's weights arrive{often}, in {duration(moving)}")
    return lines


def _whole_run(job: Job, machine: Machine, times: Times, price: float | None) -> list[str]:
    """Estimates of the time and cost of all steps and of the rollouts, and the data they need."""
    run, rollouts = job.run, times.rollouts()
    samples, available = job.updates * job.batch.total, job.epoch
    whole = f"in all: about {duration(times.steps())} for {run.max_steps} steps"
    if rollouts:
        whole += f", and {duration(rollouts)} for the teacher's rollouts if the cache is empty"
    lines = [
        whole,
        "not counted: encoding, measurements, pictures, what ranks send each other",
        f"it trains on {samples} samples; the data have {available}, "
        f"so each is seen {round(samples / available, 2):g} times",
    ]
    if price is not None:
        lines.append(f"it costs about {cost(times.whole(), machine, price)}")
    return lines


def cost(seconds: float, machine: Machine, price: float) -> str:
    """The price of so many seconds of a machine, and its GPU-hours."""
    hours = seconds / 3600 * (machine.ranks if machine.device_free is not None else 0)
    return f"{hours * price:.2f}: {hours:.1f} GPU-hours at {price:g}"


def _fit(job: Job, needed: list[Demand], files: DiskUse) -> list[str]:
    if short := [d for d in needed if not d.is_met]:
        fewer = (files.checkpoints - 2) * files.checkpoint
        hint = f". --keep_checkpoints 1 takes {fewer / GIB:.1f} GiB less"
        hint = hint if fewer > 0 and "disk" in short[-1].where else ""
        lines = [
            f"does NOT fit: it needs {d}, {d.over / GIB:.1f} GiB more than fits in {d.supply}" for d in short
        ]
        return [*lines[:-1], lines[-1] + hint]
    if not job.teacher.memory_known:
        weights = teacher_bytes(job.folder, job.teacher, 1).device / GIB
        return [
            *(f"without the teacher: {d.need / GIB:.1f} of {d.supply}" for d in needed),
            f"whether it fits is not known: accelerate finds a place for the teacher's {weights:.1f} GiB "
            "when it loads them; this plan does not count them",
        ]
    return [f"fits: {d.need / GIB:.1f} of {d.supply}" for d in needed]


class Planned(NamedTuple):
    """A stage of the recipe, or the run, on a machine."""

    job: Job
    machine: Machine
    """With what its disk has room for."""
    short: list[Demand]
    """What does not fit."""
    fits: list[Choice]
    """The simplest pair of shipped JSONs that fits, for each teacher JSON."""


class Recommended(NamedTuple):
    """A recipe whose stages fit, by their name."""

    runs: dict[str, RunConfig]
    best: dict[str, Choice]
    values: dict[str, Any]
    """As the user wrote them."""

    def write(self, file: Path, machine: Machine) -> list[str]:
        """Write it on rank 0, and return the lines that say so and how to train with it."""
        values = {"output_dir": f"runs/{file.stem}"} | self.values
        recipes = {s: _without_engines(run, values) | self.best[s].settings for s, run in self.runs.items()}
        if collectives.rank() == 0:
            write_json(file, recipes[""] if "" in recipes else in_stages(recipes, values))
        return [f"wrote {file}", f"next: {next_command(file, machine)}"]


def verdict(planned: list[Planned]) -> list[str]:
    """Say whether every stage fits, and if not, what does."""
    names = [stage.job.stage for stage in planned if stage.short]
    if not names and not all(stage.job.teacher.memory_known for stage in planned):
        return ["verdict: whether it fits is not known"]
    if not names:
        return [f"verdict: {f'all {len(planned)} stages fit' if len(planned) > 1 else 'it fits'}"]
    lines = [f"verdict: it does NOT fit{': stage ' * bool(names[0])}{', '.join(names)}"]
    of_disk = ["disk" in demand.where for stage in planned for demand in stage.short]
    if all(of_disk):
        return [*lines, "it fits with more free disk"]
    if fitting := _fitting_flags(planned):
        return [*lines, f"it fits with{' more free disk and' * any(of_disk)}", f"  {fitting}"]
    job = planned[0].job
    lines.append(f"no settings fit here. {helps(job)}")
    if job.run.lora is None:
        recipe = LORAS[len(job.folder.configs) == 2, job.folder.config.takes_image]
        lines.append(f"a LoRA needs least: wandistiller plan --recipe ds_configs/machines/{recipe}.json")
    return lines


def _fitting_flags(planned: list[Planned]) -> str | None:
    """Return flags with which every stage fits: the student's engine alone, if that is enough."""
    known = all(stage.job.teacher.memory_known for stage in planned)
    if known and all(next(choices(stage.job, stage.machine, (True, False)), None) for stage in planned):
        return AUTO
    first, *others = ([choice.teacher for choice in stage.fits] for stage in planned)
    common = next((name for name in first if all(name in names for names in others)), None)
    return f"{AUTO} --teacher_deepspeed_config {common}" if common else None


def next_command(file: str | Path, machine: Machine) -> str:
    """Return the command that trains with a recipe on a machine."""
    train = f"wandistiller train --recipe {shlex.quote(str(file))}"
    if machine.ranks == 1 and machine.device_free is None:
        return train
    if machine.ranks > machine.ranks_on_node:
        return f"HOSTFILE=launch/hostfile bash launch/deepspeed.sh{train.removeprefix('wandistiller')}"
    return f"deepspeed --num_gpus {machine.ranks} --module {train}"


def _without_engines(config: RunConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `config`, shorthands written out, without the settings that the engines' JSONs hold."""
    defaults = asdict(RunConfig())
    in_jsons = {"teacher_dtype", *ONLY_FLAGS, *OVERRIDES}
    recipe = asdict(config)
    recipe |= {key: values.get(key, defaults[key]) for key in ("output_dir", "cache_dir", "resume")}
    return {k: value for k, value in recipe.items() if value != defaults[k] and k not in in_jsons}
