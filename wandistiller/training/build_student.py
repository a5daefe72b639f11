"""Build the student: prune the teacher, make the engines, measure the student before training.

All ranks take the same calibration samples and so agree; results of the teacher's owner are broadcast.
"""

import math
from functools import partial
from typing import Any

from torch import nn

from wandistiller.batch import STUDENT, Batch
from wandistiller.checkpoint import checkpointer, loading
from wandistiller.config.identity import write_resolved
from wandistiller.config.job import Job
from wandistiller.config.networks import copied_experts
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.tensor_cache import Measured
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.sequence_parallel import ALONE, Ranks, whole_sequences
from wandistiller.engine.monitors import name_run
from wandistiller.experts import Expert
from wandistiller.flow import band_name
from wandistiller.network.adapters import is_adapter
from wandistiller.network.names import set_parameter
from wandistiller.network.network import Network
from wandistiller.student.calibration import (
    BANDS,
    MOST,
    VelocityError,
    calibration_batches,
    measure,
    velocity_error,
)
from wandistiller.student.config import IMPORTANCE, kept_layers, source_experts, teacher_block_of
from wandistiller.student.initialize import plan_cuts
from wandistiller.student.layer_importance import importance, write_importance
from wandistiller.student.learner import Learner
from wandistiller.student.slicing import WidthSlicer
from wandistiller.teacher.base import Teacher, local_networks, owner_rank, without_guidance
from wandistiller.training.networks import NetworkBuilder
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import write_json
from wandistiller.utils.logging import set_activity

SHARE_AT_START, FEWEST_AT_START = 0.01, 4
"""Share of a run's samples on which the error before training is measured, and the fewest that are.

Each is one call of the student and one of the teacher, as in a step at least.
"""


def initial_learners(
    job: Job, data: CachedData, teacher: Teacher | None, ranks: Ranks = ALONE
) -> tuple[Job, dict[str, Learner]]:
    """Return the run with its pruning chosen, and its networks by role, blank if it resumes. Collective."""
    if ranks.degree != job.run.context_parallel:
        raise ValueError("ranks that share samples are made by `ranks_of`, once, and handed on")
    if job.resume_from:
        builder = NetworkBuilder(job, teacher, ranks=ranks)
        return job, {STUDENT: build_student(builder)} | build_others(builder)
    job, cuts = plan_pruning(job, data, teacher) if job.needs_measuring else (job, {})
    write_lineage(job, cuts)
    builder = NetworkBuilder(job, teacher, cuts, ranks)
    student = build_student(builder)
    measure_start(job, data, teacher if data.has_latents else None, student)
    return job, {STUDENT: student} | build_others(builder)


def build_student(builder: NetworkBuilder) -> Learner:
    """Build the student in its engines: with initial weights, or blank if the run resumes. Collective."""
    set_activity("building the student")
    job, run, bases = builder.job, builder.job.run, bool(builder.job.networks.bases)
    learning = builder.networks(STUDENT)
    others = builder.networks(STUDENT, learns=False)
    if job.resume_from:
        loading.load_frozen(_trained(others), job.resume_from)
    if job.resume_from and not bases:
        loading.load_frozen(_trained(learning), job.resume_from)
    checkpointer.keep_frozen(_trained(learning | others), job.output, job.resume_from, adapters_alone=bases)
    name_run(job.output, job.student_engine, goes_on=job.resume_from is not None)
    called = {e: network for e, network in others.items() if job.networks.student[e].is_called}
    for network in called.values():
        _place(network.module, job)
    return Learner(
        learning,
        job.student_engine,
        learning_rates=run.learning_rates,
        ema=run.ema,
        ema_start=run.ema_start,
        frozen=called,
    )


def _trained(networks: dict[Expert, Network]) -> dict[Expert, nn.Module]:
    return {expert: network.trained for expert, network in networks.items()}


def _place(module: nn.Module, job: Job) -> None:
    """Move a network that does not learn to where this rank computes, in the precision of its engine."""
    for name, p in list(module.named_parameters()):
        if not job.networks.share_base or is_adapter(name):
            dtype = job.student_transformer.dtype_of(name, job.student_engine.dtype)
            set_parameter(module, name, p.detach().to(collectives.device(), dtype))
    module.to(collectives.device()).eval().requires_grad_(False)


def build_others(builder: NetworkBuilder) -> dict[str, Learner]:
    """Build what the objective trains beside the student, by role; blank if the run resumes. Collective."""
    learners = {}
    for role, row in builder.job.networks.others.items():
        set_activity(f"building the {role}")
        learners[role] = Learner(builder.networks(role), row.engine, role=role)
    return learners


def plan_pruning(job: Job, data: CachedData, teacher: Teacher) -> tuple[Job, dict[Expert, WidthSlicer]]:
    """Choose the layers that the student keeps, and how the width of each network is cut. Collective."""
    set_activity("measuring the teacher")
    teacher, batches = without_guidance(teacher), calibration_of(job, data)
    if job.student.keep_layers == IMPORTANCE:
        job = job.with_layers(_important(job, teacher, batches, data.measured))
        if collectives.rank() == 0:
            write_resolved(job)
    cuts = {}
    for expert in job.networks.student if job.is_cut else ():
        served = source_experts(job.student, job.folder, expert)
        used = [b for b in batches if b.expert in served]
        samples = sum(len(b.sigma_B) for b in used)
        collectives.log0("measuring the teacher's activations: %d samples", samples)
        modules = {network.module for e, network in local_networks(teacher).items() if e in served}
        calls, owner = [partial(teacher.velocity, b) for b in used], owner_rank(teacher)
        with whole_sequences(modules):  # statistics of all patches
            measured = measure(modules, calls)
        here = collectives.rank() == owner
        cut = plan_cuts(job.student, job.student_transformer, job.folder, expert, measured) if here else None
        cuts[expert] = collectives.broadcast_object(cut, owner)
    return job, cuts


def _important(job: Job, teacher: Teacher, batches: list[Batch], measured: Measured) -> list[int]:
    experts = {source for e in job.networks.student for source in source_experts(job.student, job.folder, e)}
    layers, keep = job.folder.config.num_layers, job.student_transformer.num_layers
    rounds = importance(teacher, [b for b in batches if b.expert in experts], layers, keep, measured)
    chosen, file = list(rounds[-1]), job.output / "importance.json"
    collectives.log0("kept      layers %s of %d; see %s", chosen, layers, file)
    if collectives.rank() == 0:
        write_importance(job.output, rounds, (e for e in Expert if e in experts))
    return chosen


def write_lineage(job: Job, cuts: dict[Expert, WidthSlicer]) -> None:
    """Write OUTPUT/lineage.json on rank 0: the teacher's networks and blocks that the student's come from."""
    if collectives.rank() == 0 and job.start:
        origin = {"stands_for": job.stands_for}
        write_json(job.output / "lineage.json", {expert.value: origin for expert in job.networks.student})
    if collectives.rank() or job.student.init != "teacher":
        return
    layers = kept_layers(job.student, job.student_transformer, job.folder)
    origins = {
        expert.value: {
            "made_of": [e.value for e in source_experts(job.student, job.folder, expert)],
            "kept_layers": layers,
            "stands_for": teacher_block_of(layers, job.folder.config.num_layers),
            "cut": {name: axis.in_words() for name, axis in cuts.get(expert, WidthSlicer()).axes.items()},
        }
        for expert in job.networks.student
    }
    write_json(job.output / "lineage.json", origins)


def measure_start(job: Job, data: CachedData, teacher: Teacher | None, student: Learner) -> None:
    """Write OUTPUT/student_start.json: parameters, error to a teacher without guidance. Collective."""
    set_activity("measuring the student before training")
    numel = job.student_transformer.numel * len(job.networks.student)
    of_teacher = sum(config.numel for config in job.folder.configs.values())
    numbers: dict[str, Any] = {"parameters": {"teacher": of_teacher, "student": numel}}
    if teacher:
        whole, by_sigma = _start_error(job, data, without_guidance(teacher), student)
        numbers |= {"relative_velocity_error": whole, "relative_velocity_error_by_sigma": by_sigma}
        collectives.log0(
            "start     relative velocity error before training %.4f (0: its teacher, 1: zeros)", whole
        )
    if collectives.rank() == 0:
        write_json(job.output / "student_start.json", numbers)


def _start_error(
    job: Job, data: CachedData, teacher: Teacher, student: Learner
) -> tuple[float, dict[str, float]]:
    """Return the student's error before training, and by band of sigma: known, or measured. Collective."""
    if begins_as_teacher(job):
        return 0.0, {band_name(*band): 0.0 for band in BANDS}
    samples = job.run.max_steps * job.batch.total
    batches = calibration_of(job, data, most=max(FEWEST_AT_START, int(SHARE_AT_START * samples)))
    progress = Progress("velocity error at the start", 2 * len(batches), "call")
    targets = map(progress.counting(teacher.velocity), batches)
    error = velocity_error(batches, targets, progress.counting(student.velocity))
    error = collectives.broadcast_object(error)
    inputs = (t for b in batches for t in b.tensors())
    if all(t.isfinite().all() for t in inputs):  # else the step that uses the sample names it
        require_finite_start(job, error)
    return error.relative(), error.by_sigma()


def begins_as_teacher(job: Job) -> bool:
    """Return whether the student computes before training what its teacher computes."""
    copies = copied_experts(job.student, job.student_transformer, job.folder, job.networks.student)
    if job.start or (job.run.lora or {}).get("start") or copies != {e: e for e in job.folder.configs}:
        return False
    engine, teacher = job.student_engine, job.teacher
    if teacher.weights and not job.networks.share_base:
        return False
    return engine.dtype == teacher.engine.dtype


def require_finite_start(job: Job, error: VelocityError) -> None:
    """Raise a ConfigError if the error before training, equal on all ranks, is not finite."""
    if not math.isfinite(error.relative()):
        raise ConfigError(
            f"{job.folder.path}: the velocity error before training is not finite: the teacher's outputs are "
            "zero, or its or the student's are not finite. Fetch the teacher again, or look at its pictures: "
            "wandistiller sample."
        )


def calibration_of(job: Job, data: CachedData, most: int = MOST) -> list[Batch]:
    """Make the batches on which a run's networks are measured, of `most` samples at most.

    What a student is made by has them all, so that it does not depend on the length of its run.
    """
    tokens = job.folder.tokens(job.run.height, job.run.width, job.run.num_frames)
    return calibration_batches(data, job.schedule, tokens=tokens, batch_size=job.run.prepare_batch, most=most)
