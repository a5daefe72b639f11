"""Build the student: prune the teacher, make the engines, measure the student before training.

All ranks take the same calibration samples and so agree; results of the teacher's owner are broadcast.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from wandistiller.batch import STUDENT, Batch
from wandistiller.checkpoint import checkpointer, loading
from wandistiller.config.adapter_files import start_changes, start_reader
from wandistiller.config.identity import write_settings
from wandistiller.config.job import Job
from wandistiller.config.networks import CHECKPOINT, COPY, RUN, SHARED, NetworkPlan, copied_experts
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.tensor_cache import Measured
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.sequence_parallel import ALONE, Ranks, whole_sequences
from wandistiller.engine.monitors import name_run
from wandistiller.experts import Expert
from wandistiller.export.source import Source, read_source
from wandistiller.flow import band_name
from wandistiller.monitoring.metrics import finite_or_none
from wandistiller.network.adapters import begin_with, is_adapter, set_no_change
from wandistiller.network.names import set_parameter
from wandistiller.network.network import Computing, Network, without_memory, zeros
from wandistiller.network.weight_reader import WeightReader
from wandistiller.student.calibration import (
    BANDS,
    MOST,
    calibration_batches,
    importance,
    measure,
    velocity_error,
    write_importance,
)
from wandistiller.student.config import IMPORTANCE, kept_layers, source_expert, teacher_block_of
from wandistiller.student.initialize import copied_weights, plan_cuts, start_weights
from wandistiller.student.learner import Learner
from wandistiller.student.pruning import WidthSlicer
from wandistiller.teacher.base import Teacher, local_networks, owner_rank, without_guidance
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import write_json
from wandistiller.utils.logging import set_activity


class NetworkBuilder:
    """Builder of the networks of a run's table: of a teacher's weights, another run's, or blank to resume."""

    def __init__(
        self,
        job: Job,
        teacher: Teacher | None = None,
        cuts: dict[Expert, WidthSlicer] | None = None,
        ranks: Ranks = ALONE,
    ):
        """Take what the networks are made of.

        Args:
            teacher: needed by networks that share its weights.
            cuts: how each network is cut from the teacher, if it is narrower.
            ranks: those that share samples.
        """
        self.job, self.cuts, self.ranks = job, cuts or {}, ranks
        self._bases = local_networks(without_guidance(teacher)) if job.networks.share_base else {}

    def network(self, row: NetworkPlan) -> Network:
        """Make a network as its row says, prepared to learn or to be called. Collective."""
        merges = self.job.run.merge_text_padding
        computing = Computing.of(row.engine, merges_padding=merges, ranks=self.ranks)
        # a ZeRO-3 engine leaves the tables where they are (deepspeed 0.19.8)
        network = Network.made(row.config, self._weights(row), collectives.device()).prepare(
            row.trained,
            begin=partial(self._begin, row),
            base=self._bases[row.base] if row.weights == SHARED else None,
            computing=computing if row.is_called else None,
        )
        if not row.learns:
            network.trained.requires_grad_(False)
        return network

    def networks(self, role: str, *, learns: bool = True) -> dict[Expert, Network]:
        """Make the networks of a role that learn, or those that do not. Collective."""
        rows = self.job.networks.by_role[role].items()
        return {expert: self.network(row) for expert, row in rows if row.learns == learns}

    def _weights(self, row: NetworkPlan) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that a network begins with. Collective."""
        job = self.job
        if row.weights == SHARED:
            return without_memory(row.config)
        if row.weights == COPY:
            return copied_weights(job.folder, row.copied)
        if row.weights == CHECKPOINT:
            return zeros(row.config)
        if row.weights == RUN:
            weights = _start(job).finished(row.expert.value, torch.float32)
            return ((name, value) for name, value in weights if name in row.config.shapes)
        cuts = self.cuts.get(row.expert)
        return start_weights(job.student, row.config, job.folder, row.expert, job.run.seed, cuts)

    def _begin(self, row: NetworkPlan, module: nn.Module) -> None:
        """Let adapters begin as another run left them, or as a file has them. Collective."""
        job = self.job
        if row.trained and row.trained.lora is not None and not job.resume_from:
            if row.base and row.config.has_second_time:
                _read_second_time(row, module, start_reader(job, row.expert))
            if row.base and job.start:
                _start(job).fill_adapters(row.expert.value, module)
            else:
                begin_with(module, start_changes(job, row.expert))
        if row.as_base and row.base:
            set_no_change(module)
            if row.config.has_second_time:
                _read_second_time(row, module, job.folder.reader(row.base))


def _read_second_time(row: NetworkPlan, module: nn.Module, reader: WeightReader) -> None:
    """Let a second time begin as in the weights of a base, or as the first there. Collective."""
    row.config.complete(module, reader)
    if problems := collectives.gather_problems(reader.faults):
        raise ConfigError(*problems)


def _start(job: Job) -> Source:
    """Read what another run left. Collective."""
    with collectives.raise_on_all_ranks():
        return read_source(job.start.folder, share=(collectives.rank(), collectives.world_size()))


SHARE_AT_START, FEWEST_AT_START = 0.01, 4
"""Share of a run's samples on which the error before training is measured, and the fewest that are.

Each is one call of the student and one of the teacher, as in a step at least.
"""


def initial_learners(
    job: Job, data: CachedData, teacher: Teacher | None, ranks: Ranks = ALONE
) -> tuple[Job, dict[str, Learner]]:
    """Return the run with its pruning chosen, and its networks by role, blank if it resumes. Collective."""
    if job.resume_from:
        builder = NetworkBuilder(job, teacher, ranks=ranks)
        return job, {STUDENT: build_student(builder)} | build_others(builder)
    job, cuts = plan_pruning(job, data, teacher) if job.needs_measuring else (job, {})
    write_lineage(job)
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
        loading.load_frozen(_trained(others if bases else others | learning), job.resume_from)
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
            write_settings(job)
    cuts = {}
    for expert in job.networks.student if job.is_cut else ():
        served = source_expert(job.student, job.folder, expert)
        used = [b for b in batches if b.expert is served]
        samples = sum(len(b.sigma_B) for b in used)
        collectives.log0("measuring the teacher's activations: %d samples", samples)
        modules = {network.module for e, network in local_networks(teacher).items() if e is served}
        calls, owner = [partial(teacher.velocity, b) for b in used], owner_rank(teacher)
        with whole_sequences(modules):  # statistics of all patches
            measured = measure(modules, calls)
        here = collectives.rank() == owner
        cut = plan_cuts(job.student, job.student_transformer, job.folder, expert, measured) if here else None
        cuts[expert] = collectives.broadcast_object(cut, owner)
    return job, cuts


def _important(job: Job, teacher: Teacher, batches: list[Batch], measured: Measured) -> list[int]:
    experts = {source_expert(job.student, job.folder, e) for e in job.networks.student}
    layers, keep = job.folder.config.num_layers, job.student_transformer.num_layers
    rounds = importance(teacher, [b for b in batches if b.expert in experts], layers, keep, measured)
    chosen, file = list(rounds[-1]), job.output / "importance.json"
    collectives.log0("kept      layers %s of %d; see %s", chosen, layers, file)
    if collectives.rank() == 0:
        write_importance(job.output, rounds, (e for e in Expert if e in experts))
    return chosen


def write_lineage(job: Job) -> None:
    """Write OUTPUT/lineage.json on rank 0: the teacher's networks and blocks that the student's come from."""
    if collectives.rank() == 0 and job.start:
        origin = {"stands_for": job.stands_for}
        write_json(job.output / "lineage.json", {expert.value: origin for expert in job.networks.student})
    if collectives.rank() or job.student.init != "teacher":
        return
    layers = kept_layers(job.student, job.student_transformer, job.folder)
    origins = {
        expert.value: {
            "made_of": [source_expert(job.student, job.folder, expert).value],
            "kept_layers": layers,
            "stands_for": teacher_block_of(layers, job.folder.config.num_layers),
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
        text = "start     error before training %.4f (0: the student equals its teacher, 1: it draws noise)"
        collectives.log0(text, whole)
    if collectives.rank() == 0:
        write_json(job.output / "student_start.json", finite_or_none(numbers))


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


def calibration_of(job: Job, data: CachedData, most: int = MOST) -> list[Batch]:
    """Make the batches on which a run's networks are measured, of `most` samples at most.

    What a student is made by has them all, so that it does not depend on the length of its run.
    """
    tokens = job.folder.tokens(job.run.height, job.run.width, job.run.num_frames)
    return calibration_batches(data, job.schedule, tokens=tokens, batch_size=job.run.prepare_batch, most=most)
