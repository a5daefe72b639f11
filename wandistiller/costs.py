"""The least time of a step: what is computed, and what is moved at the same time, at given rates."""

from collections.abc import Callable, Iterator
from math import ceil, prod
from typing import NamedTuple

import torch

from wandistiller.deepspeed_json import dtype_name, offload_device, stage
from wandistiller.flops import flops
from wandistiller.items import Kind
from wandistiller.job import Job
from wandistiller.machine import Machine
from wandistiller.memory import numels
from wandistiller.placement import read_placement
from wandistiller.planner import student_network
from wandistiller.rates import Rates
from wandistiller.recompute import read_recompute
from wandistiller.wan import TEXT_TOKENS

ADAM_BYTES = 30
"""CPU memory read and written for an element of a step of Adam: weight, gradient, moments; weight, moments, a copy in bf16."""


class Move(NamedTuple):
    """Bytes that go one way for one call or step."""

    what: str
    nbytes: int
    way: str
    """The rate that it goes at: pcie, link, network, memory or disk."""

    def seconds(self, rates: Rates) -> float:
        return self.nbytes / (1e9 * getattr(rates, self.way))


class Cost(NamedTuple):
    """One kind of work of an optimizer step on one rank."""

    what: str
    times: int
    """In one step."""
    tflop: float
    """10^12 operations each time."""
    tflops: float
    """10^12 operations a second that it is done at."""
    moves: tuple[Move, ...]
    """While it computes."""

    def computing(self) -> float:
        """Seconds of arithmetic, all times."""
        return self.times * self.tflop / self.tflops

    def moving(self, rates: Rates) -> float:
        """Seconds of the slowest way, all times."""
        ways = {m.way for m in self.moves}
        return self.times * max((sum(m.seconds(rates) for m in self.moves if m.way == way) for way in ways), default=0.0)

    def seconds(self, rates: Rates) -> float:
        """At least."""
        return max(self.computing(), self.moving(rates))


def _shares(job: Job) -> dict[int, float]:
    """The share of samples that have so many tokens: media are taken to be spread evenly over the buckets."""
    items, rollouts = job.items, job.run.rollouts_per_prompt
    media = int((items.kinds != Kind.PROMPT).sum()) / items.samples(rollouts)
    found: dict[int, float] = {}
    for sizes, share in (([job.size], 1 - media), (job.buckets or [job.size], media)):
        for s in sizes:
            tokens = job.folder.tokens(s.height, s.width, s.num_frames)
            found[tokens] = found.get(tokens, 0.0) + share / len(sizes)
    return found


class Costs:
    """The arithmetic of a step of `job` on a rank of `machine`."""

    def __init__(self, job: Job, machine: Machine, rates: Rates):
        self.job, self.machine, self.rates = job, machine, rates
        self.shares = _shares(job)

    def all(self) -> list[Cost]:
        """What a step consists of, one after the other."""
        return [*(self._teacher() if self.job.objective.needs_teacher else ()), self._student(), self._optimizer()]

    def floor(self) -> float:
        """Seconds that a step takes at least."""
        return sum(cost.seconds(self.rates) for cost in self.all())

    def _mean(self, of: Callable[[int], float]) -> float:
        """Of what a sample of so many tokens takes."""
        return sum(share * of(tokens) for tokens, share in self.shares.items())

    def _teacher(self) -> Iterator[Cost]:
        """The calls of a step; those of an owner wait for each other."""
        j, asked, m = self.job, read_placement(self.job.teacher_ds), self.machine
        branches = 2 if {j.run.guidance_scale, j.run.guidance_scale_2} != {1} else 1
        tflop = branches * j.batch.micro * self._mean(lambda t: flops(j.folder.config, t).forward) / 1e12
        times, tflops = j.batch.accumulation, self.rates.tflops
        if asked.on_one_rank:
            tflop *= m.ranks_on_node
        if asked.on_cpu and m.device_free is not None:
            tflops = self.rates.cpu_tflops / m.ranks_on_node
        moves = (*tuple(self._streamed()) * (asked.guidance_passes if branches == 2 else 1), *self._asked())
        yield Cost("the teacher's call", times, tflop, tflops, moves)

    def _streamed(self) -> Iterator[Move]:
        """The teacher's weights on their way to one call, of one expert."""
        j, m, ds = self.job, self.machine, self.job.teacher_ds
        if read_placement(ds).placement != "engine" or stage(ds) == 0:
            return
        whole = sum(numels(j.folder.config).values()) * getattr(torch, dtype_name(ds)).itemsize
        home = offload_device(ds)
        if home == "nvme":
            yield Move("its weights from disk", whole * m.ranks_on_node // m.ranks, "disk")
        if home != "none" and m.device_free is not None:
            yield Move("its weights over PCIe", whole // m.ranks, "pcie")
        yield from self._around("its weights from the other ranks", whole, read_placement(ds).shards)

    def _asked(self) -> Iterator[Move]:
        """What goes to an owner and back, float32: states and texts, answers."""
        j, m = self.job, self.machine
        if not read_placement(j.teacher_ds).on_one_rank or m.ranks_on_node == 1:
            return
        config = j.folder.config
        states = int(2 * self._mean(lambda t: t) * prod(config["patch_size"]) * config["in_channels"])
        text = TEXT_TOKENS * config["text_dim"]
        yield Move("questions and answers", 4 * j.batch.micro * (states + text) * (m.ranks_on_node - 1), "link")

    def _student(self) -> Cost:
        """A micro-step's forward and backward pass."""
        j, m, ds = self.job, self.machine, self.job.student_ds
        again, item, network = read_recompute(ds), getattr(torch, dtype_name(ds)).itemsize, student_network(j)
        each = self._mean(lambda t: flops(j.student_transformer, t).step(again, network))
        tflop = j.batch.micro * len(j.objective.states) * each / 1e12
        gradients = item * sum(network.trained.values())
        whole = gradients + item * sum(network.frozen.values())
        moves = list(self._around("gradients to the other ranks", self._reduced(gradients))) if stage(ds) >= 2 else []
        if stage(ds) == 3:
            passes = 2  # forward and backward; what is computed again is still there
            # a second part, cut among neighbours, serves from the first forward pass of a step on (deepspeed 0.19.8)
            second = ds["zero_optimization"].get("zero_hpz_partition_size", 1) > 1
            far = whole // j.batch.accumulation if second else passes * whole
            moves += self._around("weights from the other ranks", far)
            moves += self._around("weights from the node's other ranks", passes * whole - far, "node") if second else []
            if offload_device(ds) != "none" and m.device_free is not None:
                moves.append(Move("weights over PCIe", passes * whole // m.ranks, "pcie"))
            if offload_device(ds) == "nvme":
                moves.append(Move("weights from disk", passes * whole * m.ranks_on_node // m.ranks, "disk"))
        if self._home("offload_optimizer") != "none" and m.device_free is not None:
            moves.append(Move("gradients over PCIe", gradients // m.ranks, "pcie"))
        return Cost("the student's passes", j.batch.accumulation, tflop, self.rates.tflops, tuple(moves))

    def _optimizer(self) -> Cost:
        """One step of Adam on this rank's part; on an accelerator it takes next to nothing."""
        m, ds = self.machine, self.job.student_ds
        trained, home = sum(student_network(self.job).trained.values()), self._home("offload_optimizer")
        part, whole, moves = trained // m.ranks, trained * getattr(torch, dtype_name(ds)).itemsize, []
        if stage(ds) <= 1:
            moves += self._around("gradients to the other ranks", self._reduced(whole))
        if stage(ds) in (1, 2):
            moves += self._around("new weights from the other ranks", whole)
        if home != "none" or m.device_free is None:
            moves.append(Move("weights and moments in CPU memory", ADAM_BYTES * part * m.ranks_on_node, "memory"))
            if m.device_free is not None:
                moves.append(Move("new weights over PCIe", 2 * part, "pcie"))
        if home == "nvme":
            moves.append(Move("weights and moments from and to disk", 32 * part * m.ranks_on_node, "disk"))
        return Cost("the optimizer's step", 1, 0.0, self.rates.tflops, tuple(moves))

    def _reduced(self, gradients: int) -> int:
        """Bytes that go around for their mean: twice, to all ranks, but under stage 3 with NCCL, whose ranks get their own part.

        Stage 2 takes the mean of whole buckets too (deepspeed 0.19.8), and so does gloo for what asks for parts (torch 2.13).
        """
        return gradients * (1 if stage(self.job.student_ds) == 3 and self.machine.device_free is not None else 2)

    def _around(self, what: str, whole: int, shards: str = "world") -> Iterator[Move]:
        """`whole` bytes, a part of each rank's, to all ranks, or to those of each node: around a ring, all but the own part."""
        m = self.machine
        nodes = 1 if shards == "node" else -(-m.ranks // m.ranks_on_node)
        ranks = m.ranks if nodes > 1 else m.ranks_on_node
        sent = whole * (ranks - 1) // ranks
        if m.ranks_on_node > 1:
            yield Move(what, sent, "link")
        if nodes > 1:
            yield Move(f"{what}, between nodes", sent, "network")

    def _home(self, section: str) -> str:
        return self.job.student_ds["zero_optimization"].get(section, {}).get("device", "none")

    def micro_batch_that_hides_streaming(self) -> int | None:
        """Samples of a micro-step from which on the teacher computes for longer than its weights are on their way."""
        if not self.job.objective.needs_teacher or not any(self._streamed()):
            return None
        (call,) = self._teacher()
        return max(1, ceil(call.moving(self.rates) / (call.computing() / self.job.batch.micro)))
