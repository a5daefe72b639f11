"""Lower bound of the time of a step: what is computed, and what is moved at the same time, at given rates."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from math import ceil, prod
from typing import Any, NamedTuple

from wandistiller.batch import STUDENT
from wandistiller.config.job import Job
from wandistiller.engine.activation_checkpointing import CheckpointPolicy
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.transfers import Transfer, exchange_transfers, ring_transfers
from wandistiller.planner.hardware_rates import Rates
from wandistiller.planner.machine import Machine
from wandistiller.planner.student_network import (
    matched_blocks,
    network_of,
    other_shape,
    student_model,
    student_shape,
)
from wandistiller.planner.sweeps import base_sweeps, sweeps_of
from wandistiller.planner.teacher_memory import sharers_of_a_call
from wandistiller.student.projections_and_heads import PROJECTIONS
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.activation_memory import Latent
from wandistiller.wan.flops import forward_flops, step_flops
from wandistiller.wan.text_padding import TEXT_TOKENS
from wandistiller.wan.transformer_config import TransformerConfig

ADAM_BYTES = 30
"""Bytes of CPU memory read (weight, gradient, moments) and written (weight, moments, a copy in bf16) for an
element in Adam's step."""


class StageTime(NamedTuple):
    """One kind of work of an optimizer step on one rank."""

    what: str
    times: int
    """Repetitions in one step."""
    tflop: float
    """10^12 operations of each."""
    tflops: float
    """10^12 operations a second at which they are done."""
    moves: tuple[Transfer, ...]
    """Transfers at the same time."""
    waits_for: tuple[Transfer, ...] = ()
    """Transfers in each repetition during which nothing is computed."""

    def computing(self) -> float:
        """Seconds of arithmetic, of all repetitions."""
        return self.times * self.tflop / self.tflops

    def moving(self, rates: Rates) -> float:
        """Seconds of the slowest way of what moves meanwhile, of all repetitions."""
        return self.times * _slowest(self.moves, rates)

    def waiting(self, rates: Rates) -> float:
        """Seconds in which nothing is computed, of all repetitions."""
        alone = sum(_slowest((one,), rates) for one in self.waits_for)  # one after the other
        return max(0.0, self.moving(rates) - self.computing()) + self.times * alone

    def seconds(self, rates: Rates) -> float:
        return self.computing() + self.waiting(rates)


def _slowest(transfers: tuple[Transfer, ...], rates: Rates) -> float:
    seconds: Counter[str] = Counter()
    for one in transfers:
        seconds[one.way] += one.nbytes / (1e9 * getattr(rates, one.way))
    return max(seconds.values(), default=0.0)


class _Learner(NamedTuple):
    """A network that learns."""

    role: str
    shape: tuple[Any, ...]
    """Arguments of `student_model`."""
    engine: EngineConfig
    updates: int
    """In a step."""
    states: int
    """Kinds of states in a forward and backward pass."""
    calls: float
    """Forward passes without gradient, for a micro-step."""
    finished: float = 0
    """Those of them that the finished high-noise expert makes, which is whole on each rank."""


def _learners(job: Job) -> Iterator[_Learner]:
    o = job.objective
    # simulated samples begin with the calls before the first that is trained
    finished = len(o.updates) * min(job.schedule.exits()) if o.others else 0
    calls = o.student_calls(job.schedule) + (o.calls_at_samples if job.swept > 1 else 0)
    yield _Learner(STUDENT, student_shape(job), job.student_engine, 1, len(o.kinds), calls, finished)
    for name, (role, _, engine) in job.others.items():  # the student's update calls it once
        # with heads there are cached latents too, and a gradient of the input costs two calls more
        calls = (3 if role.has_heads else 1) / role.updates
        kinds = 2 if role.has_heads else 1
        yield _Learner(name, other_shape(job, role), engine, role.updates, kinds, calls)


def _shares(job: Job) -> dict[Latent, float]:
    """Share of samples by the shape of the latent; media are assumed to be spread evenly over the buckets."""
    rollouts = int(job.items.made.sum()) * job.run.rollouts_per_prompt
    media = 1 - rollouts / job.epoch
    shares: Counter[Latent] = Counter()
    for sizes, share in (([job.size], 1 - media), (job.buckets or [job.size], media)):
        for s in sizes:
            latent = job.folder.latent_shape(s.height, s.width, s.num_frames)
            shares[latent] += share / len(sizes)
    return {latent: share for latent, share in shares.items() if share}


def rollouts_of(job: Job, updates: int | None = None) -> int:
    """Return how many samples of prompts without media the run's updates that read latents have.

    Args:
        updates: number of other updates to count for, such as all of the run.
    """
    samples = int(job.items.made.sum()) * job.run.rollouts_per_prompt
    return min(samples, (len(job.updates_with_latents) if updates is None else updates) * job.batch.total)


@once_for_each
def _step_flops(shape: list[Any], latent: Latent, policy: dict[str, Any] | None) -> int:
    """Operations of the student's forward and backward pass over one sample, by its `student_shape`."""
    model = student_model(*shape)
    patch = model.config.patch_size
    tokens = prod(n // p for n, p in zip(latent[1:], patch, strict=True))
    projected = sum(p.numel() for name, p in model.named_parameters() if name.startswith(PROJECTIONS))
    recomputed = policy and CheckpointPolicy(**policy)
    return step_flops(model, shape[0], latent, recomputed) + 3 * 2 * tokens * projected


def _attention_anew(policy: CheckpointPolicy | None) -> float:
    """Share of the blocks whose attention backward computes once more."""
    return 1 / policy.checkpoint_every if policy and policy.checkpoint != "feed_forward" else 0


class StepTime:
    """Least time of a step of `job` on a rank of `machine`."""

    def __init__(self, job: Job, machine: Machine, rates: Rates):
        self.job, self.machine, self.rates = job, machine, rates
        self.shares, self.topology = _shares(job), machine.topology
        self.sharers = job.run.context_parallel

    def all(self) -> list[StageTime]:
        """The stages of a step, one after the other."""
        teacher = self._teacher() if self.job.objective.needs_teacher else []
        learners = _learners(self.job)
        return [*teacher, *(work for one in learners for work in (self._passes(one), self._optimizer(one)))]

    def floor(self) -> float:
        """Least seconds of a step."""
        return sum(work.seconds(self.rates) for work in self.all()) - self.ahead()

    def forward_passes(self) -> dict[str, float]:
        """Forward passes of one of the teacher's networks that a step is worth, for a sample, by network.

        Another network's passes count by its size. A backward pass counts as two, those of adapters too,
        which compute less, and what it recomputes by its share of the blocks. Samples that the student draws
        take the mean number of steps.
        """
        j, o = self.job, self.job.objective
        calls = j.branches * (o.predicts_at_noised + o.calls_at_samples) if o.needs_teacher else 0
        passes = {"teacher": float(calls)}
        whole = self._mean(lambda latent: forward_flops(j.folder.config, latent))
        for one in _learners(j):
            config, policies = one.shape[0], (None, one.engine.recompute, CheckpointPolicy())
            size = self._mean(lambda latent, config=config: forward_flops(config, latent)) / whole
            none, own, blocks = (self._learning(one, policy) for policy in policies)
            again = (own - none) / (blocks - none) if own > none else 0.0
            passes[one.role] = one.updates * size * (one.states * (3 + again) + one.calls)
        return passes

    def _learning(self, one: _Learner, policy: CheckpointPolicy | None) -> float:
        """Operations of a forward and backward pass over one sample."""
        return self._mean(lambda latent: _step_flops(one.shape, latent, policy and asdict(policy)))

    def warm_up(self) -> float:
        """Least seconds of the updates before the first step."""
        objective = self.job.objective.with_warmup()
        if objective == self.job.objective:
            return 0.0
        more = replace(self.job, objective=objective)
        return StepTime(more, self.machine, self.rates).floor() - self.floor()

    def steps(self) -> float:
        """Least seconds of all steps, and of the updates before the first."""
        return self.warm_up() + self.job.run.max_steps * self.floor()

    def ahead(self) -> float:
        """Seconds of the optimizer's step in which the teacher already predicts for the next one."""
        j, on_gpu = self.job, self.topology.accelerator
        if j.objective.calls_at_samples or not j.objective.predicts_at_noised or self.sharers > 1:
            return 0.0
        if not j.teacher.works_ahead(on_gpu=on_gpu):
            return 0.0
        teacher, *_, optimizer = self.all()
        predicting = teacher.seconds(self.rates) / (teacher.times if matched_blocks(j) else 1)
        return min(predicting, optimizer.moving(self.rates))

    def rollouts(self) -> float:
        """Least seconds of arithmetic to fill an empty cache with all rollouts of `rollouts_of`."""
        j, call = self.job, self.teacher_call()
        each = j.run.rollout_steps * call.tflop / call.tflops / j.batch.micro
        return rollouts_of(j) / j.batch.ranks * each

    def _mean(self, of: Callable[[Latent], float]) -> float:
        """Mean over the samples of a function of the latent's shape."""
        return sum(share * of(latent) for latent, share in self.shares.items())

    def _teacher(self) -> list[StageTime]:
        """The calls of a step; of those that go through the blocks together the weights move once."""
        o, steps, call = self.job.objective, self.job.batch.accumulation, self.teacher_call()
        kinds, sweeps = o.predicts_at_noised + o.calls_at_samples, ceil(steps / self.job.swept)
        if sweeps == steps:
            return [call._replace(times=steps * max(1, kinds))]
        each = steps / sweeps
        exchanged = tuple(one._replace(nbytes=round(each * one.nbytes)) for one in call.waits_for)
        name, tflop = "the teacher's sweep", each * call.tflop
        return [StageTime(name, kinds * sweeps, tflop, call.tflops, call.moves, exchanged)]

    def student_call(self, samples: int) -> float:
        """Seconds of arithmetic of a forward pass of the student."""
        config = self.job.student_transformer
        tflop = samples / self.sharers * self._mean(lambda latent: forward_flops(config, latent)) / 1e12
        return tflop / self.rates.tflops

    def teacher_call(self, of: int = 0, *, guided: bool = True) -> StageTime:
        """One call of the teacher; those of an owner wait for each other.

        Args:
            of: samples; 0: those of a micro-step.
        """
        j, t, tflops = self.job, self.topology, self.rates.tflops
        placement, both, config = j.teacher, j.branches if guided else 1, j.folder.config
        of = of or j.batch.micro
        sharers, samples = sharers_of_a_call(j), both * of
        tflop = samples / sharers * self._mean(lambda shape: forward_flops(config, shape)) / 1e12
        moves = self._streamed() * min(placement.guidance_passes, both)
        if placement.on_one_rank:
            tflop *= max(1, t.ranks_on_node // self.sharers)  # once for those that share a sample
            states, text = int(2 * self._mean(prod)), TEXT_TOKENS * config.text_dim
            if others := t.ranks_on_node - 1:
                nbytes = 4 * of * (states + text) * others  # float32
                moves.append(Transfer("inputs and outputs", nbytes, "link"))
        if placement.on_cpu and t.accelerator:
            tflops = self.rates.cpu_tflops / t.ranks_on_node
        exchanged = self._exchanged(config, placement.engine, samples, sharers)
        return StageTime("the teacher's call", 1, tflop, tflops, tuple(moves), exchanged)

    def _exchanged(
        self, config: TransformerConfig, engine: EngineConfig, passes: float, sharers: int
    ) -> tuple[Transfer, ...]:
        """Transfers of queries, keys, values and outputs in passes of one sample, during which ranks wait."""
        patch = prod(config.patch_size)
        own = (
            self._mean(lambda latent: prod(latent[1:]) // patch)
            / sharers
            * config.width
            * engine.dtype.itemsize
        )
        nbytes = round(4 * config.num_layers * passes * own)
        return tuple(exchange_transfers("attention of shared samples", nbytes, sharers, self.topology))

    def _streamed(self) -> list[Transfer]:
        """Transfers of the teacher's weights in one forward pass, of one expert."""
        return list(self.job.teacher.traffic(self.job.folder.config, self.topology))

    def _passes(self, one: _Learner) -> StageTime:
        """Forward and backward pass of a micro-step, and the calls without gradient."""
        j, t, engine, network = self.job, self.topology, one.engine, network_of(*one.shape)
        policy = engine.recompute
        each = self._learning(one, policy)
        call = self._mean(lambda latent: forward_flops(one.shape[0], latent))
        tflop = j.batch.micro / self.sharers * (one.states * each + one.calls * call) / 1e12
        gradients = engine.dtype.itemsize * network.trained_numel
        given: list[Transfer] = []
        if engine.stage >= 2:
            given += ring_transfers("gradients to the other ranks", self._reduced(gradients, engine), t)
        if engine.optimizer_on != "none" and t.accelerator:
            given.append(
                Transfer("gradients over PCIe", self._offloaded(network.trained_numel, engine), "pcie")
            )
        moves: list[Transfer] = []
        if engine.stage == 3:
            frozen = 0 if j.shares_base else network.frozen_numel
            moves += self._gathered(one, gradients + engine.dtype.itemsize * frozen)
        if base_sweeps(j):
            sweeps = sweeps_of(j, one.role)
            moves += [each._replace(nbytes=round(sweeps * each.nbytes)) for each in self._streamed()]
        times, tflops = one.updates * j.batch.accumulation, self.rates.tflops
        # stages 1 and 2 give gradients away on the stream that computes, or on another, for whose copies to
        # CPU memory the host waits, so that it launches little meanwhile (deepspeed 0.19.8)
        offloaded = engine.optimizer_on != "none"
        overlaps = engine.zero.overlap_comm and not offloaded
        if meanwhile := engine.stage == 3 or overlaps:
            moves += given
        passes = j.batch.micro * (one.states * (2 + _attention_anew(policy)) + one.calls)
        waits_for = self._exchanged(one.shape[0], engine, passes, self.sharers)
        waits_for += () if meanwhile else tuple(given)
        return StageTime(f"the {one.role}'s passes", times, tflop, tflops, tuple(moves), waits_for)

    def _offloaded(self, trained: int, engine: EngineConfig) -> int:
        """Bytes of gradients over PCIe in a micro-step, of k: the mean over an update's.

        Stage 2 adds each micro-step's to those in CPU memory on the accelerator, so they go there and back,
        and at last once in float32: 4 k + 2 bytes in bf16, and 4 of one micro-step. Stage 3 brings them back
        at last too, and stage 1 adds them up on the accelerator (deepspeed 0.19.8, `copy_grads_in_partition`
        and stage 3's `partition_grads`).
        """
        k, item, part = engine.batch.accumulation, engine.dtype.itemsize, trained // self.topology.ranks
        added = {2: (2 * k - 1) * item if k > 1 else 0, 3: 2 * k * item}.get(engine.stage, 0)
        return part * (4 + added) // k

    def _gathered(self, one: _Learner, whole: int) -> Iterator[Transfer]:
        """Transfers of a network's weights under ZeRO-3 in a micro-step.

        Args:
            whole: bytes of all weights.
        """
        t, engine = self.topology, one.engine
        # forward, backward and calls without gradient; recomputed blocks still have their weights
        both = round((2 + one.calls - one.finished) * whole)
        # a second part, cut among neighbours, serves from a step's first forward pass on (deepspeed 0.19.8)
        second = engine.zero.zero_hpz_partition_size > 1
        far = whole // self.job.batch.accumulation if second else both
        yield from ring_transfers("weights from the other ranks", far, t)
        if second:
            yield from ring_transfers("weights from the node's other ranks", both - far, t, within_node=True)
        if engine.weights_on != "none" and t.accelerator:
            yield Transfer("weights over PCIe", both // t.ranks, "pcie")
        if engine.weights_on == "nvme":
            yield Transfer("weights from disk", both * t.ranks_on_node // t.ranks, "disk")

    def _optimizer(self, one: _Learner) -> StageTime:
        """Steps of Adam on this rank's part; on an accelerator they take next to nothing."""
        t, engine = self.topology, one.engine
        trained, home = network_of(*one.shape).trained_numel, engine.optimizer_on
        whole, part = trained * engine.dtype.itemsize, trained // t.ranks
        of_node, moves, waits_for = part * t.ranks_on_node, [], []
        if engine.stage <= 1:
            waits_for += ring_transfers("gradients to the other ranks", self._reduced(whole, engine), t)
        if engine.stage in (1, 2):
            waits_for += ring_transfers("new weights from the other ranks", whole, t)
        if home != "none" or not t.accelerator:
            moves.append(Transfer("weights and moments in CPU memory", ADAM_BYTES * of_node, "memory"))
        if home != "none" and t.accelerator:
            moves.append(Transfer("new weights over PCIe", 2 * part, "pcie"))
        if home == "nvme":
            moves.append(Transfer("weights and moments from and to disk", 32 * of_node, "disk"))
        name = "the optimizer's step" if one.role == STUDENT else f"the {one.role}'s optimizer"
        return StageTime(name, one.updates, 0.0, self.rates.tflops, tuple(moves), tuple(waits_for))

    def _reduced(self, gradients: int, engine: EngineConfig) -> int:
        """Bytes around the ring to average gradients: twice as many, but for NCCL's reduce-scatter.

        Stage 2 averages whole buckets too (deepspeed 0.19.8), and gloo has no reduce-scatter (torch 2.13).
        """
        return gradients * (1 if engine.stage == 3 and self.topology.accelerator else 2)

    def micro_batch_that_hides_streaming(self) -> int | None:
        """Least micro-batch at which the teacher computes for longer than its weights take to arrive."""
        if not self.job.objective.needs_teacher or not self._streamed():
            return None
        call = self.teacher_call()
        each = call.computing() / self.job.batch.micro * self.job.swept  # a sample of each of them
        return max(1, ceil(call.moving(self.rates) / each))
