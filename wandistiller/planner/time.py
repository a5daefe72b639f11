"""Estimated time of a run: operations over a share of a card's peak, or the teacher's weights on their way.

Whichever of both takes longer. Not counted are encoding, measurements and pictures, the optimizer, and what
ranks send each other.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Annotated, Any

from annotated_types import Gt, Lt

from wandistiller.batch import STUDENT
from wandistiller.config.job import Job, branches, swept
from wandistiller.network.activation_memory import Latent
from wandistiller.network.config import NetworkConfig
from wandistiller.network.flops import Flops, count_flops
from wandistiller.objectives.script import TEACHER
from wandistiller.planner.machine import Machine
from wandistiller.planner.passes import Passes, base_sweeps, passes_asked
from wandistiller.planner.teacher_memory import sharers_of_a_call
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.system_memory import GIB
from wandistiller.utils.validation import check, types_of

SHARE = 1 / 3
"""Share of the maker's peak of dense products in bf16 that a whole step is assumed to reach.

By a step of a 14B's LoRA at 480x832 on an H100, which took 20.0 s: 0.31 of 990 TFLOP/s. Blocks alone reach
0.43 to 0.5 there (docs/benchmarks.md)."""
PEAKS = {
    "B200": (2250, 50),
    "H200": (990, 50),
    "H100": (990, 50),
    "A100": (312, 24),
    "L40S": (362, 24),
    "L40": (181, 24),
    "L4": (121, 12),
    "A10": (70, 24),
    "A6000": (155, 24),
    "5090": (210, 48),
    "4090": (165, 24),
    "4080": (97, 24),
    "3090": (71, 24),
    "V100": (125, 12),
}
"""Part of a GPU's name -> the maker's peak in 10^12 operations a second, and 10^9 bytes a second of PCIe.

The first that fits counts; the A10's are those of the A10G."""
BY_MEMORY = {16: "4080", 24: "4090", 40: "A100", 48: "L40S", 80: "A100"}
"""GiB of a GPU -> the kind that it is taken for where its name is not known."""
CPU = 0.05
"""10^12 operations a second in float32 of the few cores of a rank without a GPU."""
HOST = 1.0
"""The same of all cores of a node, for a teacher that computes there beside GPUs."""
DISK = 5.0
"""10^9 bytes a second of a node's disk."""
Rate = Annotated[float, Gt(0), Lt(10**9)]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one rank."""

    tflops: Rate
    """10^12 operations of products and attention in each second of a step."""
    pcie: Rate
    """10^9 bytes a second from CPU memory to the accelerator."""


def usual_rates(machine: Machine) -> Rates:
    """Return SHARE of the peak of the GPU, known by its name or its memory; without GPUs a CPU's rate."""
    if (size := machine.device_total or machine.device_free) is None:
        return Rates(CPU, DISK)
    by_name = (part for part in PEAKS if re.search(rf"{part}(?!\d)", machine.device_name))
    by_size = BY_MEMORY[max((gib for gib in BY_MEMORY if gib <= 1.1 * size / GIB), default=min(BY_MEMORY))]
    peak, pcie = PEAKS[next(by_name, by_size)]
    return Rates(SHARE * peak, pcie)


def override_rates(usual: Rates, rates: dict[str, Any]) -> Rates:
    """Replace the rates that the user gives.

    Raises:
        ConfigError: for other keys than those of Rates, and for values that are no positive numbers.
    """
    problems, checked = check("command line", rates, types_of(Rates), "rates.")
    if problems:
        raise ConfigError(*problems)
    return replace(usual, **checked)


def passes(job: Job, updates: Sequence[str] = ()) -> dict[str, Passes]:
    """Return the passes in a step by network, with the blocks that backward passes recompute.

    Args:
        updates: the role of each update, by default the objective's of a step.
    """
    made = passes_asked(job, updates)
    for role, each in made.items():
        if each.backward:
            config, engine = _network(job, role)[0], job.student_engine
            engine = engine if role == STUDENT else job.networks.others[role].engine
            again = _mean(job, config, lambda flops, engine=engine: flops.recomputed(engine.recompute))
            made[role] = each._replace(forward=each.forward + each.backward * again)
    return made


def _network(job: Job, role: str) -> tuple[NetworkConfig, float]:
    """Return the architecture of a network, and the share of its weights that learn."""
    if role == TEACHER:
        return job.folder.config, 0.0
    row = job.networks.first if role == STUDENT else job.networks.others[role]
    parameters = row.all_parameters
    return row.config, parameters.trained_numel / (parameters.trained_numel + parameters.frozen_numel)


class Times:
    """Estimated seconds of `job` on the ranks of `machine`."""

    def __init__(self, job: Job, machine: Machine, rates: Rates, updates: Sequence[str] = ()):
        """Estimate steps of updates by their roles, by default of the objective's."""
        self.job, self.machine, self.rates = job, machine, rates
        self._updates = updates or job.objective.updates
        self.topology = machine.topology

    def call(self, role: str, samples: int) -> float:
        """Seconds of arithmetic of a forward pass; of the teacher without its null branch."""
        config, _ = _network(self.job, role)
        return samples * self._computing(role, _mean(self.job, config, lambda flops: flops.forward))

    def computing(self) -> dict[str, float]:
        """Seconds of arithmetic of a step, by network."""
        j, by_role = self.job, {}
        samples = j.batch.micro * j.batch.accumulation
        for role, each in passes(j, self._updates).items():
            config, trained = _network(j, role)
            backward = _mean(j, config, lambda flops, trained=trained: flops.backward(trained))
            learning = samples * self._computing(role, each.backward * backward)
            by_role[role] = each.forward * self.call(role, samples) + learning
        return by_role

    def moving(self) -> float:
        """Seconds of a step in which weights of the teacher come from CPU memory or a disk."""
        j = self.job
        if j.networks.share_base:
            return sum(base_sweeps(j, self._updates).values()) * self._fetching()
        calls = passes(j, self._updates)[TEACHER].forward / branches(j)
        return calls * ceil(j.batch.accumulation / swept(j)) * self._passes() * self._fetching()

    def step(self) -> float:
        """Seconds of a step; what uses the teacher's weights computes while the next of them come."""
        computing = self.computing()
        meanwhile = sum(computing.values()) if self.job.networks.share_base else computing[TEACHER]
        return sum(computing.values()) + max(0.0, self.moving() - meanwhile)

    def warm_up(self) -> float:
        """Seconds of the updates before the first step."""
        if not (warmup := self.job.objective.warmup):
            return 0.0
        longer = Times(self.job, self.machine, self.rates, (*warmup, *self.job.objective.updates))
        return longer.step() - self.step()

    def steps(self) -> float:
        """Seconds of all steps, and of the updates before the first."""
        return self.warm_up() + self.job.run.max_steps * self.step()

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

    def _computing(self, role: str, flops: float) -> float:
        """Seconds of a rank for so many operations, of samples that ranks may share."""
        j, t, rate = self.job, self.topology, self.rates.tflops
        if role != TEACHER:
            return flops / j.run.context_parallel / rate / 1e12
        if j.teacher.on_cpu and t.accelerator:
            rate = HOST / t.ranks_on_node
        together = max(1, t.ranks_on_node // j.run.context_parallel) if j.teacher.on_one_rank else 1
        return together * flops / sharers_of_a_call(j) / rate / 1e12

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


def _mean(job: Job, config: NetworkConfig, of: Callable[[Flops], float]) -> float:
    """Return the mean over the run's samples of what a network's operations on each come to."""
    return sum(share * of(count_flops(config, latent)) for latent, share in _shares(job).items())


def _shares(job: Job) -> dict[Latent, float]:
    """Share of samples by the shape of the latent; media are assumed to be spread evenly over the buckets."""
    made = int(job.items.made.sum()) * job.run.rollouts_per_prompt / job.epoch
    shares: Counter[Latent] = Counter()
    for sizes, share in (([job.size], made), (job.buckets or [job.size], 1 - made)):
        for s in sizes:
            latent = job.folder.latent_shape(s.height, s.width, s.num_frames)
            shares[latent] += share / len(sizes)
    return {latent: share for latent, share in shares.items() if share}
