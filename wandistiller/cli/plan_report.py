"""Lines that `wandistiller plan` prints: memory by phase, the step, the whole run, the verdict."""

from collections.abc import Iterable

from wandistiller.config.job import Job
from wandistiller.config.summary import precision_lines, summary
from wandistiller.engine.transfers import Transfer
from wandistiller.planner.disk import DiskUse, disk_demands, written
from wandistiller.planner.hardware_rates import Rates
from wandistiller.planner.machine import Machine, demands
from wandistiller.planner.other_work import ROLLOUTS, before_the_steps, pictures, whole_run
from wandistiller.planner.peak_memory import activations, plan
from wandistiller.planner.phase_peak import PhasePeak, moments, most
from wandistiller.planner.step_time import StepTime
from wandistiller.planner.sweeps import base_sweeps
from wandistiller.planner.teacher_memory import teacher_bytes
from wandistiller.utils.system_memory import GIB

KINDS = {
    "GPU": lambda b: b.device + b.transient,
    "CPU, of its own": lambda b: b.host,
    "CPU, of all ranks of a node": lambda b: b.node,
    "disk": lambda b: b.disk,
}
"""Kind of memory -> its bytes in a part of a phase."""


def report(job: Job, machine: Machine, rates: Rates, here: bool, price: float | None = None) -> list[str]:
    """Describe the run, a line each.

    Args:
        here: whether the machine is this one, whose disks can be examined.
        price: of a GPU for an hour.
    """
    phases, files = plan(job, machine), written(job, accelerator=machine.device_free is not None)
    return [
        *_machine(machine),
        *summary(job)[:-1],
        *(precision_lines(job) if here else []),
        "",
        *_table(phases, machine),
        _activations(job, machine),
        f"files of all ranks: {files}",
        "",
        *_step(job, machine, rates),
        "",
        *_whole_run(job, machine, rates, price),
        *_verdict(job, phases, machine, files, here),
    ]


def duration(seconds: float) -> str:
    """Hours, minutes or seconds, whichever says it in a short number."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.2g} s"


def _machine(m: Machine) -> list[str]:
    gpus = "no GPU"
    if m.device_free is not None:
        gpus = f"{m.ranks_on_node} x {m.device_free / GIB:.0f} GiB of GPU memory"
    return [
        f"machine   {m.ranks // m.ranks_on_node} node(s), each with {gpus}, "
        f"{m.host_free / GIB:.0f} GiB of CPU memory, {m.disk_free / GIB:.0f} GiB of disk; {m.ranks} rank(s)"
    ]


def _table(phases: dict[str, PhasePeak], machine: Machine) -> list[str]:
    """For each kind of memory, the parts of every phase at the moment of its peak of that kind."""
    lines = []
    for kind, taken in KINDS.items():
        columns = {name: phase.parts(taken) for name, phase in phases.items()}
        rows = dict.fromkeys(part for column in columns.values() for part, n in column.items() if n)
        if rows:
            peaks = [phase.peak() for phase in phases.values()]
            lines += ["", f"{f'{kind}: GiB of one rank':<56}{''.join(f'{name:>12}' for name in phases)}"]
            lines += [_row(part, (column.get(part, 0) for column in columns.values())) for part in rows]
            lines.append(_row("at its peak", map(taken, peaks)))
            if kind == "CPU, of its own" and any(peak.pinned for peak in peaks):
                lines.append(_row("of it pinned, at most", (peak.pinned for peak in peaks)))
    reserves = [f"{d.reserve / GIB:.2f} GiB {d.where}" for d in demands([], machine)]
    why = "reserve: of a GPU its allocator's slack, elsewhere data, file cache and other processes"
    return [*lines[1:], "", why, f"reserve: {', '.join(reserves)}"]


def _activations(job: Job, machine: Machine) -> str:
    recomputed, stored = (f"{n / GIB:.2f} GiB" for n in activations(job, machine))
    chosen = " (as its JSON says)"
    first, second = (chosen, "") if job.student_engine.recompute else ("", chosen)
    return f"student's activations: {recomputed} with checkpointing{first}, {stored} without{second}"


def _row(name: str, numbers: Iterable[int]) -> str:
    return f"{name:<56}{''.join(f'{n / GIB:>12.2f}' if n else f'{chr(45):>12}' for n in numbers)}"


def _step(job: Job, machine: Machine, rates: Rates) -> list[str]:
    costs = StepTime(job, machine, rates)
    lines = [f"{'one step of a rank':<32}{'times':>6}{'TFLOP':>10}{'computes':>11}{'waits':>11}  for"]
    for cost in costs.all():
        moved = [_transfer(one, rates) for one in cost.moves]
        moved += [f"{_transfer(one, rates)} (nothing computes meanwhile)" for one in cost.waits_for]
        lines.append(
            f"{cost.what:<32}{cost.times:>6}{cost.times * cost.tflop:>10.1f}{cost.computing():>9.3f} s"
            f"{cost.waiting(rates):>9.3f} s  {', '.join(moved)}"
        )
    if ahead := costs.ahead():
        lines.append(f"the teacher works for the next step during {ahead:.3f} s of the optimizer's")
    waiting = sum(cost.waiting(rates) for cost in costs.all()) - ahead
    least = f"a step takes at least {costs.floor():.3f} s at {rates.tflops:g} TFLOP/s"
    lines.append(f"{least}; {waiting:.3f} s of it waiting for transfers")
    passes = costs.forward_passes()
    each = ", ".join(f"{number:.3g} the {role}'s" for role, number in passes.items())
    worth = f"it is worth {sum(passes.values()):.3g} forward passes of the teacher for each sample"
    lines.append(f"{worth}, a backward pass counted as two: {each}")
    if sweeps := base_sweeps(job):
        updates = len(job.objective.updates)
        each = ", ".join(f"{number:.3g} for {purpose}" for purpose, number in sweeps.items())
        mean = sum(sweeps.values()) / updates
        lines.append(f"sweeps of the shared base: {mean:.2g} an update; in a step of {updates}, {each}")
    micro = costs.micro_batch_that_hides_streaming()
    if micro is not None:
        lines.append(
            f"the teacher computes for as long as its weights are on their way from {micro} samples "
            f"a micro-step on; now {job.batch.micro}"
        )
    return lines


def _transfer(one: Transfer, rates: Rates) -> str:
    return f"{one.nbytes / GIB:.2f} GiB {one.what} at {getattr(rates, one.way):g} GB/s"


def _whole_run(job: Job, machine: Machine, rates: Rates, price: float | None) -> list[str]:
    """Estimates of the time and cost of all steps and of the cache, and the data they need."""
    run, costs = job.run, StepTime(job, machine, rates)
    steps, warm_up = costs.steps(), costs.warm_up()
    cache = dict(before_the_steps(job, machine, rates)).get(ROLLOUTS)
    samples, available = job.updates * job.batch.total, job.epoch
    lines = [
        f"the whole run, an estimate: at least {duration(steps)} for {run.max_steps} steps"
        + (f", {duration(warm_up)} of it of the critic alone before them" if warm_up else "")
        + (f", and {duration(cache)} for the teacher's rollouts if the cache is empty" if cache else ""),
        *other_lines(job, machine, rates),
        f"it trains on {samples} samples; the data have {available}, "
        f"so each is seen {samples / available:.1f} times",
        f"for each to be seen only once, bring {-(-samples // run.rollouts_per_prompt)} prompts",
    ]
    if price is not None:
        lines.append(f"it costs at least {cost(whole_run(job, machine, rates), machine, price)}")
    return lines


def cost(seconds: float, machine: Machine, price: float) -> str:
    """The price of so many seconds of a machine, and its GPU-hours."""
    hours = seconds / 3600 * (machine.ranks if machine.device_free is not None else 0)
    return f"{hours * price:.2f}: {hours:.1f} GPU-hours at {price:g}"


def other_lines(job: Job, machine: Machine, rates: Rates) -> list[str]:
    works, lines = before_the_steps(job, machine, rates), []
    if works:
        parts = ", ".join(f"{duration(work.seconds)} for {work.what}" for work in works)
        whole = f"{duration(sum(work.seconds for work in works))} without encoding the data"
        lines.append(f"before step 1, with an empty cache: at least {whole}; {parts}")
    teacher, student, times = pictures(job, machine, rates)
    once = f"{duration(teacher)} for the teacher's, once, and " if teacher else ""
    return [*lines, f"pictures: at least {once}{duration(student)} for the student's, {times} time(s)"]


def _verdict(
    job: Job, phases: dict[str, PhasePeak], machine: Machine, files: DiskUse, here: bool
) -> list[str]:
    *memory, one = demands(moments(phases), machine)
    swapped = machine.ranks_on_node * most(phases).disk
    disks = disk_demands(job, machine, swapped) if here else [one._replace(need=swapped + files.whole)]
    needed = [d for d in (*memory, *disks) if d.need]
    if short := [d for d in needed if not d.is_met]:
        fewer = (files.checkpoints - 2) * files.checkpoint
        hint = f". --keep_checkpoints 1 takes {fewer / GIB:.1f} GiB less"
        hint = hint if fewer > 0 and short[-1] in disks else ""
        lines = [
            f"does NOT fit: it needs {d}, {d.over / GIB:.1f} GiB more than {d.supply} leave" for d in short
        ]
        return [*lines[:-1], lines[-1] + hint]
    if not job.teacher.memory_known:
        weights = teacher_bytes(job.folder, job.teacher, 1).device / GIB
        return [
            *(f"without the teacher: {d.need / GIB:.1f} of {d.supply}" for d in needed),
            f"whether it fits is not known: accelerate finds a place for the teacher's {weights:.1f} GiB "
            "when it loads them; neither they nor their way to it are counted",
        ]
    return [f"fits: {d.need / GIB:.1f} of {d.supply}" for d in needed]
