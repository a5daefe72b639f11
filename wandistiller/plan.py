"""`wandistiller plan`: what a run will take of a machine, phase by phase, and how long a step lasts at least."""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from wandistiller import distributed
from wandistiller import rates as known
from wandistiller.auto import chosen, left_open
from wandistiller.check import read_job
from wandistiller.config import RunConfig, as_dict, read_json
from wandistiller.costs import Costs
from wandistiller.deepspeed_json import dtype_name
from wandistiller.files import write_json
from wandistiller.job import Job
from wandistiller.machine import GIB, SYSTEM, Demand, Machine, demands, disk, disk_free, this_machine
from wandistiller.memory import Bytes, teacher_bytes
from wandistiller.placement import read_placement
from wandistiller.planner import UNKNOWN, Phase, activations, most, plan
from wandistiller.problems import ConfigError, problem
from wandistiller.rates import Rates
from wandistiller.recommend import choices
from wandistiller.recompute import SECTION
from wandistiller.shorthands import merged
from wandistiller.student_json import Asked
from wandistiller.written import Written, beside, on_its_disk, swap_folder, to_come, written

KINDS = {"GPU": lambda b: b.device + b.live, "CPU, of its own": lambda b: b.host, "CPU, of all ranks of a node": lambda b: b.node,
         "disk": lambda b: b.disk}  # fmt: skip
"""Of each kind of memory, the bytes that a part of a phase takes."""


MACHINE = ("nodes", "gpus", "gpu_memory", "host_memory", "disk")
"""Flags that describe a machine that is not this one."""
SHOWN = 5
"""Combinations that are told."""


def said(own: dict[str, Any], flags: dict[str, Any]) -> list[str]:
    """What the command says, after writing the recipe that was asked for. Collective.

    Args:
        own: the flags of the machine, of the rates, and `recommend`.
        flags: those of `train`, and `recipe`.
    Raises:
        ConfigError: with every problem of the run, or where nothing fits that could be recommended.
    """
    if found := _problems(own):
        raise ConfigError(*found)
    recipe = flags.pop("recipe", None)
    values = read_json(recipe) if recipe else {}
    machine, here = described(own, Path()), all(own[key] is None for key in MACHINE)
    usual = {} if "output_dir" in values else {"output_dir": "runs/plan"}
    run = merged(values, usual | flags | {"resume": "never"}, recipe)
    job, found = read_job(run, machine.ranks, here=here), []
    if any(left_open(job)):
        choice = chosen(job, on_its_disk(machine, job, swap_folder(job, shipped=True) if here else None), here)
        job, found = choice.job, [*choice.lines(machine), ""]
    rates = known.given(known.usual(machine.device_size), own["rates"])
    if own["measure"]:
        rates = replace(rates, **known.measured(swap_folder(job), getattr(torch, dtype_name(job.student_ds))))
        found += ["not measured: link and network, see `wandistiller doctor --measure`", ""]
    machine = on_its_disk(machine, job, swap_folder(job) if here else None)
    found += lines(job, machine, rates, here)
    best = choices(job, on_its_disk(machine, job, swap_folder(job, shipped=True) if here else None), rates, here)
    found += ["", "fastest of the shipped JSONs that fit:" if best else "no combination of the shipped JSONs fits"]
    found += [f"  {choice.seconds:>9.3f} s a step at least: {choice}" for choice in best[:SHOWN]]
    if file := own["recommend"]:
        if not best:
            raise ConfigError("Nothing fits that could be recommended. What helps: a smaller student, more GPUs or nodes, more "
                              "CPU memory, fewer frames, or a teacher in bfloat16.")  # fmt: skip
        if distributed.rank() == 0:
            write_json(file, _as_asked(run, values | flags) | best[0].settings)
        found.append(f"wrote {file}")
    return found


def _as_asked(run: RunConfig, asked: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `run` but for its engines: shorthands are written out, and the flags that JSONs now say are left out.

    Args:
        asked: recipe and flags as they came.
    """
    usual, in_jsons = as_dict(RunConfig()), {"teacher_dtype", *(f.name for f in fields(Asked))}
    said = as_dict(run) | {key: asked.get(key, usual[key]) for key in ("output_dir", "resume")}
    return {key: value for key, value in said.items() if value != usual[key] and key not in in_jsons}


def _problems(own: dict[str, Any]) -> list[str]:
    least = {"gpus": 0, "nodes": 1}
    found = [problem("command line", key, own[key], f"Write {n} or more.") for key, n in least.items()
             if own[key] is not None and own[key] < n]  # fmt: skip
    if own["gpus"] == 0 and own["gpu_memory"] is not None:
        found.append(problem("command line", "gpu_memory", own["gpu_memory"], "`--gpus 0` has none; remove one of the two."))
    if own["measure"] and any(own[key] is not None for key in ("gpus", "gpu_memory")):
        found.append(problem("command line", "measure", True, "It measures this machine, not one that is described: give "
                             "--rates."))  # fmt: skip
    return found + [problem("command line", key, own[key], "Write GiB over 0.") for key in ("gpu_memory", "host_memory", "disk")
                    if own[key] is not None and not 0 < own[key] < 1e7]  # fmt: skip


def described(given: dict[str, Any], swap_path: Path) -> Machine:
    """The machine that the flags describe; what they leave out is as here. Collective.

    Args:
        given: gpus, gpu_memory, host_memory, disk (GiB, of a node) and nodes; None where it was left out. Ranks on CPUs are as
            many a node as here.
    Raises:
        ConfigError: for GPUs of which neither the user nor this machine says how large they are.
    """
    here = this_machine(swap_path)
    launched = distributed.world_size() > 1
    gpus, none = given["gpus"], here.device_free is None
    if gpus is None:
        gpus = here.ranks_on_node if launched or none else distributed.number_of_gpus()
        gpus *= not (none and given["gpu_memory"] is None)
    if gpus and given["gpu_memory"] is None and none:
        raise ConfigError(problem("command line", "gpus", gpus, "There is no GPU here: write `--gpu_memory` too."))
    free = here.device_free if given["gpu_memory"] is None else int(given["gpu_memory"] * GIB)
    host = here.host_free if given["host_memory"] is None else int(given["host_memory"] * GIB)
    disk = here.disk_free if given["disk"] is None else int(given["disk"] * GIB)
    on_node = gpus or here.ranks_on_node
    nodes = given["nodes"] or (-(-here.ranks // here.ranks_on_node) if not given["gpus"] else 1)
    total = here.device_total if given["gpu_memory"] is None else None
    return Machine(free if gpus else None, host, disk, on_node * nodes, on_node, device_total=total if gpus else None)


def lines(job: Job, machine: Machine, rates: Rates, here: bool) -> list[str]:
    """All that the command says of this run; `here`: on this machine, with its disks."""
    phases, files = plan(job, machine), written(job, accelerator=machine.device_free is not None, here=here)
    return [*_machine(machine), *job.summary()[:-1], "", *_table(phases, machine), _activations(job, machine),
            f"files of all ranks: {files}", "", *_step(job, machine, rates), "",
            *_verdict(job, phases, machine, files, here)]  # fmt: skip


def _machine(m: Machine) -> list[str]:
    gpus = "no GPU" if m.device_free is None else f"{m.ranks_on_node} x {m.device_free / GIB:.0f} GiB of GPU memory"
    return [f"machine   {m.ranks // m.ranks_on_node} node(s), each with {gpus}, {m.host_free / GIB:.0f} GiB of CPU memory, "
            f"{m.disk_free / GIB:.0f} GiB of disk; {m.ranks} rank(s)"]  # fmt: skip


def _table(phases: dict[str, Phase], machine: Machine) -> list[str]:
    """For each kind of memory, what every phase consists of where it takes most of that kind."""
    found = []
    for kind, taken in KINDS.items():
        columns = {name: phase.parts(taken) for name, phase in phases.items()}
        rows = dict.fromkeys(part for column in columns.values() for part, n in column.items() if n)
        if rows:
            found += ["", f"{f'{kind}: GiB of one rank':<56}{''.join(f'{name:>12}' for name in phases)}"]
            found += [_row(part, (column.get(part, 0) for column in columns.values())) for part in rows]
            found.append(_row("at its height", (taken(phase.peak()) for phase in phases.values())))
            if any(phase.peak().pinned for phase in phases.values()) and kind == "CPU, of its own":
                found.append(_row("of it pinned, at most", (phase.peak().pinned for phase in phases.values())))
    kept = [f"{d.reserve / GIB:.2f} GiB {d.where}" for d in demands(Bytes(), machine)]
    why = "reserve: of a GPU its allocator's slack, elsewhere data, file cache and other processes"
    return [*found[1:], "", why, f"reserve: {', '.join(kept)}"]


def _activations(job: Job, machine: Machine) -> str:
    """Of a micro-step, both ways."""
    again, kept = (f"{n / GIB:.2f} GiB" for n in activations(job, machine))
    ours = [" (as its JSON says)" * said for said in (SECTION in job.student_ds, SECTION not in job.student_ds)]
    return f"student's activations: {again} with checkpointing{ours[0]}, {kept} without{ours[1]}"


def _row(name: str, numbers: Iterable[int]) -> str:
    return f"{name:<56}{''.join(f'{n / GIB:>12.2f}' if n else f'{chr(45):>12}' for n in numbers)}"


def _step(job: Job, machine: Machine, rates: Rates) -> list[str]:
    """What a step computes and moves, and its floor."""
    costs = Costs(job, machine, rates)
    found = [f"{'one step of a rank':<32}{'times':>6}{'TFLOP':>10}{'computes':>11}{'moves':>11}  of it"]
    for cost in costs.all():
        moved = ", ".join(f"{m.nbytes / GIB:.2f} GiB {m.what} at {getattr(rates, m.way):g} GB/s" for m in cost.moves)
        found.append(f"{cost.what:<32}{cost.times:>6}{cost.times * cost.tflop:>10.1f}{cost.computing():>9.3f} s"
                     f"{cost.moving(rates):>9.3f} s  {moved}")  # fmt: skip
    moving = sum(max(0.0, c.moving(rates) - c.computing()) for c in costs.all())
    found.append(f"a step takes at least {costs.floor():.3f} s at {rates.tflops:g} TFLOP/s; {moving:.3f} s of it in wait")
    micro = costs.micro_batch_that_hides_streaming()
    if micro is not None:
        found.append(f"the teacher computes for as long as its weights are on their way from {micro} samples a micro-step on; "
                     f"now {job.batch.micro}")  # fmt: skip
    return found


def _verdict(job: Job, phases: dict[str, Phase], machine: Machine, files: Written, here: bool) -> list[str]:
    *memory, one = demands(most(phases), machine)
    swapped = machine.ranks_on_node * most(phases).disk
    disks = _disks(job, machine, swapped) if here else [one._replace(need=swapped + files.whole)]
    taken = [d for d in (*memory, *disks) if d.need]
    short = [d for d in taken if not d.is_met]
    if short:
        fewer = (files.checkpoints - 2) * files.checkpoint
        hint = f". --keep_checkpoints 1 takes {fewer / GIB:.1f} GiB less" if fewer > 0 and short[-1] in disks else ""
        return [f"does NOT fit: {_over(d)}" for d in short[:-1]] + [f"does NOT fit: {_over(short[-1])}{hint}"]
    if read_placement(job.teacher_ds).placement in UNKNOWN:
        weights = teacher_bytes(job.folder, job.teacher_ds, 1).device / GIB
        return [*(f"without the teacher: {d.need / GIB:.1f} of {d.supply}" for d in taken),
                f"whether it fits is not known: accelerate finds a place for the teacher's {weights:.1f} GiB when it loads them; "
                "neither they nor their way to it are counted"]  # fmt: skip
    return [f"fits: {d.need / GIB:.1f} of {d.supply}" for d in taken]


def _disks(job: Job, machine: Machine, swapped: int) -> list[Demand]:
    """What is to come to each disk of this machine."""
    places, swap = to_come(job, accelerator=machine.device_free is not None), swap_folder(job)
    places[swap] = places.get(swap, 0) + swapped
    several = {disk(place): place for place in reversed(places)}
    return [Demand(f"of the disk of {place}" if len(several) > 1 else "of disk", beside(place, places), disk_free(place), SYSTEM)
            for place in several.values()]  # fmt: skip


def _over(d: Demand) -> str:
    return f"it needs {d}, {(d.need - d.free + d.reserve) / GIB:.1f} GiB more than {d.supply} leave"
