"""Least time of a run's work beside its steps: rollouts, measurements before step 1, pictures."""

from collections import Counter
from collections.abc import Iterator
from math import ceil, floor
from typing import Any, NamedTuple

from wandistiller.config.job import Job
from wandistiller.experts import Expert, expert_at
from wandistiller.planner.hardware_rates import Rates
from wandistiller.planner.machine import Machine
from wandistiller.planner.step_time import StepTime, rollouts_of
from wandistiller.student.calibration import number_of_samples
from wandistiller.student.config import IMPORTANCE, source_experts
from wandistiller.student.layer_importance import blocks_left
from wandistiller.training.interval import DRAWING

ROLLOUTS = "the teacher's rollouts"


class Work(NamedTuple):
    """One kind of work."""

    what: str
    seconds: float


def before_the_steps(job: Job, machine: Machine, rates: Rates) -> list[Work]:
    """Work of networks before step 1, without encoding; the cache has what the stages before made."""
    early = _OtherWork(job, machine, rates)
    works = [Work(ROLLOUTS, early.rollouts())]
    if not job.resume_from and job.needs_latents:
        works += early.measurements()
    return [work for work in works if work.seconds]


def pictures(job: Job, machine: Machine, rates: Rates) -> tuple[float, float, int]:
    """Seconds of the teacher's pictures that no stage before drew, the student's, and how often those are."""
    work, run = _OtherWork(job, machine, rates), job.run
    teacher, student = work.drawn()
    between = max(60 * run.sample_minutes, (DRAWING - 1) * student)
    by_clock = floor(run.max_steps * work.step.floor() / between)
    return teacher, student, min(run.max_steps, max(ceil(run.max_steps / run.sample_every), by_clock))


def whole_run(job: Job, machine: Machine, rates: Rates) -> float:
    """Least seconds of a run: its steps, the work before them and the pictures."""
    teacher, student, times = pictures(job, machine, rates)
    before = sum(work.seconds for work in before_the_steps(job, machine, rates))
    return before + StepTime(job, machine, rates).steps() + teacher + times * student


def _before(job: Job) -> Iterator[Job]:
    """Yield the stages before whose teacher is the same, and keeps what it makes in the same cache."""
    stage = job
    while stage := stage.previous:
        if _teacher_of(stage) == _teacher_of(job):
            yield stage


def _teacher_of(job: Job) -> tuple[Any, ...]:
    """Return what all that the teacher makes depends on."""
    run, teacher = job.run, job.teacher
    weights = run.teacher_path, run.teacher_lora, teacher.engine.precision, teacher.weights
    guidance = run.guidance_scale, run.guidance_scale_2, run.negative_prompt
    return job.cache, *weights, *guidance, job.size, run.seed, run.shift


def _teachers_seeds(job: Job) -> int:
    """Return how many pictures the teacher draws for each prompt."""
    draws = job.objective.needs_teacher and job.has_whole_teacher
    return draws * (2 if job.schedule.few else 1)


class _OtherWork:
    def __init__(self, job: Job, machine: Machine, rates: Rates):
        self.job, self.rates, self.step = job, rates, StepTime(job, machine, rates)

    def rollouts(self) -> float:
        """Rollouts beyond those of the stages before, whose updates draw from the same first samples."""
        making = self.job.rollouts.making
        same = [stage for stage in _before(self.job) if stage.rollouts.making == making]
        drawn = rollouts_of(self.job, self.job.updates)
        there = (rollouts_of(s) / max(drawn, rollouts_of(s, s.updates), 1) for s in same)
        return self.step.rollouts() * (1 - max(there, default=0))

    def measurements(self) -> Iterator[Work]:
        """Calls on the calibration samples, which all ranks make alike, without guidance."""
        j, samples = self.job, self._calibration()
        made_of = {e: source_experts(j.student, j.folder, e) for e in j.student_experts}
        if j.needs_measuring and j.student.keep_layers == IMPORTANCE:
            used = {source for sources in made_of.values() for source in sources}
            layers = j.folder.config.num_layers
            left = blocks_left(layers, j.student_transformer.num_layers)
            # without a block, and without those dropped before, which compute nothing
            rounds = 1 + sum(n * (n - 1) / layers for n in left)
            yield Work("the importance of blocks", rounds * self._calls(samples, *used))
        if j.needs_measuring and j.is_cut:
            seconds = sum(self._calls(samples, *sources) for sources in made_of.values())
            yield Work("activations of the teacher", seconds * j.run.context_parallel)  # of whole samples
        if j.objective.needs_teacher or j.needs_measuring:
            student = self.step.student_call(1) * samples.total()
            yield Work("the error before training", self._calls(samples, *samples) + student)

    def _calibration(self) -> Counter[Expert]:
        j, run = self.job, self.job.run
        count = number_of_samples(j.folder.tokens(run.height, run.width, run.num_frames))
        sigmas = (j.schedule.shifted((i + 0.5) / count) for i in range(count))
        return Counter(expert_at(sigma, j.schedule.boundary) for sigma in sigmas)

    def _calls(self, samples: Counter[Expert], *experts: Expert) -> float:
        """Seconds of the teacher's calls on the samples of some experts."""
        return sum(self._teacher(samples[expert], self.job.run.prepare_batch) for expert in experts)

    def _teacher(self, samples: int, at_once: int, *, guided: bool = False) -> float:
        """Seconds of the teacher's calls on so many samples, `at_once` in each."""
        sizes = [at_once] * (samples // at_once) + [samples % at_once] * (samples % at_once > 0)
        return sum(self.step.teacher_call(n, guided=guided).seconds(self.rates) for n in sizes)

    def drawn(self) -> tuple[float, float]:
        """Seconds of the pictures of the teacher, and of the student once; ranks share the prompts."""
        j, run = self.job, self.job.run
        own, calls = ceil(len(run.sample_prompts or ()) / j.batch.ranks), run.sample_steps
        pictures = run.sample_prompts, calls
        same = (s for s in _before(j) if (s.run.sample_prompts, s.run.sample_steps) == pictures)
        left = max(0, _teachers_seeds(j) - max(map(_teachers_seeds, same), default=0))
        teacher = calls * self._teacher(left * own, j.batch.micro, guided=True)
        calls, own = (len(j.drawn.sigmas), 2 * own) if j.drawn else (calls, own)
        return teacher, calls * own * self.step.student_call(1)
