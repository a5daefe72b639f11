"""Decides whether blocks are compiled, where the student's JSON leaves that at "auto"."""

from dataclasses import replace
from importlib.util import find_spec

from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.distributed.device import has_bf16_gpu
from wandistiller.engine.compiler import has_compiler
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.planner.machine import Machine
from wandistiller.planner.time import Times, usual_rates
from wandistiller.teacher.teacher_json import with_keys

LEAST_HOURS = 0.5
"""Planned hours of steps that pay for compiling: it takes a minute or two, and saves about a fifth."""


def with_kernels(job: Job, machine: Machine, *, here: bool) -> tuple[Job, list[str]]:
    """Compile the blocks of all networks if nothing speaks against it; return lines on it too. Collective.

    A teacher whose JSON leaves it open follows the student, so that both round alike. Where `machine` is not
    the one `here`, any with GPUs is taken to have what compiles.
    """
    engine, teacher, has_gpu = job.student_engine, job.teacher, machine.device_free is not None
    is_compiled, policy, lines = engine.kernels.compile, engine.recompute, []
    if engine.is_compile_open:
        why = why_eager(
            bf16_gpu=has_bf16_gpu() if here else has_gpu,
            compiler=not here or find_spec("triton") is not None and has_compiler(),
            whole=engine.stage < 3 and (policy is None or policy.checkpoint == "blocks"),
            teacher=teacher.compiles() or not job.objective.needs_teacher,
            hours=Times(job, machine, usual_rates(machine)).steps() / 3600 if has_gpu else 0.0,
        )
        why = next(filter(None, collectives.gather_objects(why)), "")
        is_compiled = not why
        lines = [f"chosen    no torch.compile: {why}" if why else "chosen    torch.compile"]
    if not is_compiled:
        return job, lines
    if teacher.engine.is_compile_open and teacher.compiles():
        teacher = with_keys(teacher, compile=True)
    engine = engine.replaced(**{BLOCK: engine.block | {"compile": True}})
    return replace(job, student_engine=engine, teacher=teacher), lines


def why_eager(*, bf16_gpu: bool, compiler: bool, whole: bool, teacher: bool, hours: float) -> str:
    """Return why blocks stay eager; empty: they are compiled.

    Args:
        whole: a block's weights are there when it is called, and it is recomputed as a whole, if at all.
        teacher: its blocks may be compiled too.
        hours: of the run's steps.
    """
    reasons = {
        "there is no GPU that computes in bf16": not bf16_gpu,
        "Triton, a C compiler or Python.h is missing (apt install g++ python3-dev)": not compiler,
        "ZeRO-3, and recomputing parts of blocks, do not work with it": not whole,
        "the teacher's JSON excludes it, and both must round alike": not teacher,
        f"about {60 * hours:.0f} minutes of steps do not pay for it": hours < LEAST_HOURS,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")
