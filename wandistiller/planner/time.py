"""Estimated time of a run: operations and bytes over a share of a card's peaks, or weights on their way.

Whichever of both takes longer. Not counted are encoding, measurements and pictures, and what ranks send each
other.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from wandistiller.batch import STUDENT
from wandistiller.config.job import Job, branches
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.network.activation_memory import Latent
from wandistiller.network.config import NetworkConfig
from wandistiller.network.flops import count_flops
from wandistiller.objectives.script import TEACHER
from wandistiller.planner.machine import Machine
from wandistiller.planner.passes import Passes, base_sweeps, lone_sweeps, passes_asked, teacher_sweeps
from wandistiller.planner.teacher_memory import sharers_of_a_call
from wandistiller.utils.system_memory import GIB

SHARE = 2 / 3
"""Share of the maker's peaks, of dense products in bf16 and of memory, that kernels are assumed to reach.

In a step of a 14B's LoRA an H100 reached 0.70 and 0.63: 690 of 990 TFLOP/s, 2.1 of 3.35 TB/s."""
PEAKS = {
    "B200": (2250, 8.0, 50),
    "H200": (990, 4.8, 50),
    "H100": (990, 3.35, 50),
    "A100": (312, 2.04, 24),
    "L40S": (362, 0.864, 24),
    "L40": (181, 0.864, 24),
    "L4": (121, 0.3, 12),
    "A10": (70, 0.6, 24),
    "A6000": (155, 0.768, 24),
    "5090": (210, 1.79, 48),
    "4090": (165, 1.01, 24),
    "4080": (97, 0.717, 24),
    "3090": (71, 0.936, 24),
    "V100": (125, 0.9, 12),
}
"""Part of a GPU's name -> the maker's peaks in 10^12 operations and 10^12 bytes of its memory a second, and
10^9 bytes a second of PCIe.

The first that fits counts; the A10's are those of the A10G, the A100's those of 80 GB."""
BY_MEMORY = {16: "4080", 24: "4090", 40: "A100", 48: "L40S", 80: "A100"}
"""GiB of a GPU -> the kind that it is taken for where its name is not known."""
EAGER, COMPILED = (245, 281), (101, 113)
"""Bytes that all but products and attention moves for each number of a block's state, forward and backward.

In bf16 with adapters: tests/unit/wan/test_kernels.py; compiled by inductor's count on a CPU (torch 2.13)."""
OFFLOADED = 2e-9
"""Seconds that an update takes outside of passes for each trained number of a rank whose optimizer is in CPU
memory: 0.42 for 210M on an H100's machine with 16 cores, when it still waited for each gradient."""
ON_DEVICE = 32
"""Bytes that AdamW on a GPU moves for each trained number: gradient, float32 weight, both states, weight."""
CPU = 0.05
"""10^12 operations a second in float32 of the few cores of a rank without a GPU."""
HOST = 1.0
"""The same of all cores of a node, for a teacher that computes there beside GPUs."""
DISK = 5.0
"""10^9 bytes a second of a node's disk."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank."""

    tflops: float
    """10^12 operations a second of products and attention."""
    pcie: float
    """10^9 bytes a second from CPU memory to the accelerator."""
    tbytes: float = inf
    """10^12 bytes a second that all other kernels move; without limit where `tflops` is of whole steps."""


def usual_rates(machine: Machine) -> Rates:
    """Return SHARE of the peaks of the GPU, known by its name or its memory; without GPUs a CPU's rate."""
    if (size := machine.device_total or machine.device_free) is None:
        return Rates(CPU, DISK)
    by_name = (part for part in PEAKS if re.search(rf"{part}(?!\d)", machine.device_name))
    by_size = BY_MEMORY[max((gib for gib in BY_MEMORY if gib <= 1.1 * size / GIB), default=min(BY_MEMORY))]
    tflops, tbytes, pcie = PEAKS[next(by_name, by_size)]
    return Rates(SHARE * tflops, pcie, SHARE * tbytes)


def passes(job: Job) -> dict[str, Passes]:
    """Return the passes in a step by network, with the blocks that backward passes recompute."""
    made = passes_asked(job)
    for role, each in made.items():
        if each.backward:
            config, _, engine = _network(job, role)
            how = engine.recompute, config.num_layers
            again = _mean(job, lambda z: count_flops(config, z).recomputed(*how))  # noqa: B023
            made[role] = each._replace(forward=each.forward + each.backward * again)
    return made


def _network(job: Job, role: str) -> tuple[NetworkConfig, float, EngineConfig]:
    """Return the architecture of a network, the share of its weights that learn, and its engine."""
    if role == TEACHER:
        return job.folder.config, 0.0, job.teacher.engine
    row = job.networks.first if role == STUDENT else job.networks.others[role]
    parameters = row.all_parameters
    share = parameters.trained_numel / (parameters.trained_numel + parameters.frozen_numel)
    return row.config, share, job.student_engine if role == STUDENT else row.engine


class Times:
    """Estimated seconds of `job` on the ranks of `machine`."""

    def __init__(self, job: Job, machine: Machine, rates: Rates):
        self.job, self.machine, self.rates = job, machine, rates
        self.topology = machine.topology

    def call(self, role: str, samples: int) -> float:
        """Seconds of kernels of a forward pass; of the teacher without its null branch."""
        return samples * self._pass(role)

    def computing(self) -> dict[str, float]:
        """Seconds of kernels of a step's passes, by network."""
        samples, by_role = self.job.batch.micro * self.job.batch.accumulation, {}
        for role, each in passes(self.job).items():
            seconds = each.forward * self._pass(role) + each.backward * self._pass(role, backward=True)
            by_role[role] = samples * seconds
        return by_role

    def updating(self) -> float:
        """Seconds of a step that its updates take outside of passes."""
        j, seconds, number = self.job, 0.0, Counter(self.job.objective.updates)
        for role in (STUDENT, *j.networks.others):
            row = j.networks.first if role == STUDENT else j.networks.others[role]
            engine = _network(j, role)[2]
            numel = row.parameters.trained_numel / (j.batch.ranks if engine.stage else 1)
            each = ON_DEVICE / self.rates.tbytes / 1e12 if engine.optimizer_on == "none" else OFFLOADED
            made = number[role] + (role != STUDENT and row.setting.is_shared) * number[STUDENT]
            seconds += made * numel * each
        return seconds

    def moving(self) -> float:
        """Seconds of a step in which weights of the teacher come from CPU memory or a disk."""
        j = self.job
        if j.networks.share_base:
            return sum(base_sweeps(j).values()) * self._fetching()
        return teacher_sweeps(j) * self._passes() * self._fetching()

    def step(self) -> float:
        """Seconds of a step; what uses the teacher's weights computes while the next of them come."""
        computing = self.computing()
        meanwhile = sum(computing.values()) if self.job.networks.share_base else computing[TEACHER]
        waiting = max(0.0, self.moving() - meanwhile, self._waiting())
        return sum(computing.values()) + waiting + self.updating()

    def _waiting(self) -> float:
        """Seconds in which forward passes that learn, alone in a sweep, wait for the shared base."""
        if not base_sweeps(self.job):
            return 0.0
        wait = max(0.0, self._fetching() - self.call(STUDENT, self.job.batch.micro))
        return lone_sweeps(self.job) * wait

    def steps(self) -> float:
        """Seconds of all steps."""
        return self.job.run.max_steps * self.step()

    def rollouts(self) -> float:
        """Seconds of the teacher's rollouts, without those that the stages before have made."""
        j, at_once, before = self.job, self.job.run.prepare_batch, 0
        stage = j
        while stage := stage.previous:  # the same rollouts are in the same cache
            before = max(before, rollouts_of(stage) * (_rollouts_key(stage) == _rollouts_key(j)))
        computing = branches(j) * self.call(TEACHER, at_once)
        call = max(computing, self._passes() * self._fetching()) / at_once
        return max(0, rollouts_of(j) - before) / j.batch.ranks * j.run.rollout_steps * call

    def whole(self) -> float:
        """Seconds of the run: its rollouts and steps."""
        return self.rollouts() + self.steps()

    def _pass(self, role: str, *, backward: bool = False) -> float:
        """Seconds of a rank for a pass over one sample, which ranks may share."""
        j, t, rates = self.job, self.topology, self.rates
        config, trained, engine = _network(j, role)

        def operations(latent: Latent) -> float:
            flops = count_flops(config, latent)
            return flops.backward(trained) if backward else flops.forward

        numbers = _mean(j, lambda z: config.num_layers * config.width * prod(z[1:]) / prod(config.patch_size))
        nbytes = numbers * (COMPILED if engine.kernels.compile else EAGER)[backward]
        if role != TEACHER:
            shared = 1 / j.run.context_parallel
        else:
            if j.teacher.on_cpu and t.accelerator:
                rates = Rates(HOST / t.ranks_on_node, DISK)
            together = max(1, t.ranks_on_node // j.run.context_parallel) if j.teacher.on_one_rank else 1
            shared = together / sharers_of_a_call(j)
        return shared * (_mean(j, operations) / rates.tflops + nbytes / rates.tbytes) / 1e12

    def _passes(self) -> int:
        """Passes of the teacher's weights in a guided call."""
        return min(self.job.teacher.guidance_passes, branches(self.job))

    def _fetching(self) -> float:
        """Seconds in which the teacher's weights come once."""
        teacher = self.job.teacher
        nbytes = teacher.fetched(self.job.folder.config, self.topology)
        rate = min(DISK, self.rates.pcie) if teacher.is_on_disk() else self.rates.pcie
        return nbytes / rate / 1e9


def rollouts_of(job: Job) -> int:
    """Return how many samples of prompts without media the run's updates read."""
    samples = int(job.items.made.sum()) * job.run.rollouts_per_prompt
    return min(samples, len(job.updates_with_latents) * job.batch.total)


def _rollouts_key(job: Job) -> tuple[Any, ...]:
    run, teacher = job.run, job.teacher
    weights = run.teacher_path, run.teacher_lora, teacher.engine.precision, teacher.weights
    guidance = run.guidance_scale, run.guidance_scale_2, run.negative_prompt
    return job.cache, job.rollouts.making, job.size, *weights, *guidance


def _mean(job: Job, of: Callable[[Latent], float]) -> float:
    """Return the mean over the run's samples of a number of each latent."""
    return sum(share * of(latent) for latent, share in _shares(job).items())


def _shares(job: Job) -> dict[Latent, float]:
    """Share of samples by the shape of the latent; media are assumed to be spread evenly over the buckets."""
    made = int(job.items.made.sum()) * job.run.rollouts_per_prompt / job.epoch
    shares: Counter[Latent] = Counter()
    for sizes, share in (([job.size], made), (job.buckets or [job.size], 1 - made)):
        for s in sizes:
            latent = job.folder.latent_shape(s.height, s.width, s.num_frames)
            shares[latent] += share / len(sizes)
    return {latent: share for latent, share in shares.items() if share}
