"""Decides what GPUs keep in memory that is free, where the student's JSON leaves that at "auto"."""

from bisect import bisect_left
from dataclasses import replace
from math import ceil

from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.planner.machine import Machine, demands, moments
from wandistiller.planner.peak_memory import plan
from wandistiller.student.trainable import tuning_problems
from wandistiller.utils.system_memory import amount

SPARE = 0.1
"""Share of a GPU's free memory that is left where more could be kept: as runs may take more than planned."""
BUT_LAST = "checkpoint_but_last"
LEAST = 0.1
"""Least share of the blocks, or none, that keep their activations: fewer save under 3 % of a step."""


def with_free_memory(job: Job, machine: Machine) -> tuple[Job, list[str]]:
    """Keep the optimizer, which saves most seconds a GiB, then activations; lines say so. Collective."""
    if machine.device_free is None:
        return job, []
    job, lines = _with_optimizer(job, machine)
    job, of_activations = _with_activations(job, machine)
    return job, lines + of_activations


def _with_optimizer(job: Job, machine: Machine) -> tuple[Job, list[str]]:
    engine = job.student_engine
    if not engine.is_offload_open:
        return job, []
    zero = {k: value for k, value in engine.section("zero_optimization").items() if k != "offload_optimizer"}
    moved = replace(job, student_engine=engine.replaced(zero_optimization=zero))
    taken, fits = _demand(moved, machine)
    tuned = replace(job.run, lora=None)  # of its checks none is about the engine
    fits &= not tuning_problems(tuned, job.student_transformer, moved.student_engine)
    if collectives.on_any_rank(not fits):
        return job, [f"chosen    optimizer in CPU memory; with it on GPUs the run needs {taken}"]
    return moved, [f"chosen    optimizer on the GPUs; the run takes {taken}"]


def _with_activations(job: Job, machine: Machine) -> tuple[Job, list[str]]:
    engine, layers = job.student_engine, job.student_transformer.num_layers
    if engine.block.get(BUT_LAST) != "auto":
        return job, []

    def keeping(blocks: int) -> Job:
        return replace(job, student_engine=engine.replaced(**{BLOCK: engine.block | {BUT_LAST: blocks}}))

    numbers = range(ceil(LEAST * layers), layers + 1)
    fitting = bisect_left(numbers, True, key=lambda n: not _demand(keeping(n), machine)[1])
    most = fitting and numbers[fitting - 1]
    blocks = min(collectives.gather_objects(most))  # ranks that share a sample must compute alike
    taken, _ = _demand(keeping(blocks or numbers[0]), machine)
    kept = f"of the last {blocks} of {layers} blocks kept; the run takes {taken}"
    none = f"of no block kept; with those of {numbers[0]} of {layers} the run needs {taken}"
    return keeping(blocks), [f"chosen    activations {kept if blocks else none}"]


def _demand(job: Job, machine: Machine) -> tuple[str, bool]:
    """Say what `job` needs of a GPU, and whether all that it needs is there, with SPARE."""
    gpu, *others = demands(moments(plan(job, machine)), machine)
    taken = f"{amount(gpu.need)} of {gpu.supply}"
    return taken, gpu.need <= (1 - SPARE) * gpu.free and all(d.is_met for d in [gpu, *others])
