"""Passes of a step: the objective's scripts, played on single numbers with networks whose outputs are 0."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Conditioning, Prediction
from wandistiller.config.job import Job, branches, rolled_out, swept
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.engine.batch_size import BatchSize
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.script import TEACHER, Ask, Learn, Play, Slope

MOST_EXITS = 16
"""Calls of a few-step student that learn, of those that are counted, evenly chosen."""
LEARNING = "passes that learn"
"""Purpose of sweeps."""


class Round(NamedTuple):
    """Numbers by role of questions of a script that are answered together."""

    asked: Counter[str]
    """Predictions without gradient."""
    slopes: Counter[str]
    """Gradients in a network's input."""
    learned: Counter[str]
    """States at which a network learns."""


OF_SAMPLING = Round(Counter([STUDENT]), Counter(), Counter())
"""A call of the student by which it samples, at the beginning of a script."""


class ScriptPasses(NamedTuple):
    """Passes for a micro-step of a role's update."""

    rolled_out: float
    """Forward passes of the student, as it samples."""
    before: list[Round]
    """Questions before a network learns, which are asked for several micro-steps at once."""
    rounds: list[Round]
    """Those from there on."""
    guided: float
    """Predictions of the teacher's that have guidance."""


class Passes(NamedTuple):
    """Passes of a network in a step for each sample, means of what is drawn; recomputed blocks left out."""

    forward: float
    backward: float


def passes_asked(job: Job) -> dict[str, Passes]:
    """Return the passes of a step by network: the teacher, the student, and those trained beside it."""
    forward, backward = Counter(), Counter()
    for share, _, script in _of_step(job):
        forward[STUDENT] += share * script.rolled_out
        forward[TEACHER] += share * script.guided * (branches(job) - 1)
        for asked, slopes, learned in script.before + script.rounds:
            for name in asked | slopes | learned:  # of a slope forward, and backward to the input alone
                forward[name] += share * (asked[name] + 2 * slopes[name] + learned[name])
                backward[name] += share * learned[name]
    return {role: Passes(forward[role], backward[role]) for role in (TEACHER, STUDENT, *job.networks.others)}


def teacher_sweeps(job: Job) -> float:
    """Return the mean number of times in a step that the teacher predicts for as many samples as it may."""
    steps, groups = job.batch.accumulation, ceil(job.batch.accumulation / swept(job))
    return sum(
        share * (groups * _asked(script.before, TEACHER) + steps * _asked(script.rounds, TEACHER))
        for share, _, script in _of_step(job)
    )


def _asked(rounds: list[Round], role: str) -> int:
    return sum(each.asked[role] for each in rounds)


def _of_step(job: Job) -> Iterator[tuple[float, str, ScriptPasses]]:
    """Yield the mean number of times that updates play a script, its role, and its passes."""
    for role, number in Counter(job.objective.updates).items():
        scripts = played_scripts(job, role)
        yield from ((number / len(scripts), role, script) for script in scripts)


def base_sweeps(job: Job) -> dict[str, float]:
    """Return how often weights that all roles share come to the device in a step, by purpose: means.

    Empty if they stay there, or if each role has its own.
    """
    if not (job.networks.share_base and job.teacher.sweeps):
        return {}
    steps, updates = job.batch.accumulation, Counter(job.objective.updates)
    scripts = {role: played_scripts(job, role) for role in updates}
    together, groups = rolled_out(job), ceil(steps / swept(job))
    sweeps: Counter[str] = Counter()
    calls = {role: [script.rolled_out for script in of_role] for role, of_role in scripts.items()}
    if together > 1:
        longest = max(map(max, calls.values()))
        sweeps["the student's samples"] = ceil(updates.total() * steps / together) * longest
    else:
        each = {role: statistics.mean(of_role) for role, of_role in calls.items()}
        sweeps["the student's samples"] = steps * sum(updates[role] * each[role] for role in updates)
    for role, (script, *_) in scripts.items():
        number = steps * updates[role]
        for asked, _, _ in script.before:
            sweeps["the teacher's predictions"] += groups * updates[role] * asked[TEACHER]
            sweeps["the student's targets"] += groups * updates[role] * asked[STUDENT]
        for asked, slopes, learned in script.rounds:
            sweeps[LEARNING if learned else "scores at samples"] += number * bool(asked or learned)
            sweeps[LEARNING] += number * 2 * slopes.total()
        learning = set().union(*(learned for _, _, learned in script.rounds))
        heads = sum(other.has_heads for name, other in job.objective.others.items() if name in learning)
        # backward, of all that learn; networks with heads go alone
        sweeps[LEARNING] += number * (1 + (heads if len(learning) > 1 else 0))
    return {purpose: number for purpose, number in sweeps.items() if number}


def lone_sweeps(job: Job) -> float:
    """Return the mean number of forward passes of a step that learn and go through the weights alone."""
    alone = (
        share * sum((asked + learned).total() == learned.total() == 1 for asked, _, learned in script.rounds)
        for share, _, script in _of_step(job)
    )
    return job.batch.accumulation * sum(alone)


def played_scripts(job: Job, role: str) -> list[ScriptPasses]:
    """Count a role's passes, for which it does not matter what blocks of the teacher the student has."""
    objective = job.objective.for_student([*range(job.student_transformer.num_layers)])
    return passes_of(objective, role, job.schedule)


class _Zeros:
    """Cached samples of one number each, as `MicroBatches` reads them."""

    def x0(self, sample_index_B: list[int]) -> Tensor:
        return torch.zeros(len(sample_index_B), 1, 1, 1, 2)

    def conditioning(self, sample_index_B: list[int]) -> Conditioning:
        return Conditioning(torch.zeros(len(sample_index_B), 1, 1))

    def levels(self, sample_index_B: list[int]) -> Tensor:
        return torch.linspace(1, 0, 101)

    def states(self, sample_index_B: list[int], state_B: list[int]) -> Tensor:
        return self.x0(sample_index_B)


class _Features(dict[int, Tensor]):
    """Hidden states of every block."""

    def __missing__(self, block: int) -> Tensor:
        return torch.zeros(1, 1, 1)


@dataclass(frozen=True, slots=True)
class _EvenExits(FlowSchedule):
    """A schedule whose exits are spread evenly over some updates."""

    updates: tuple[int, ...] = ()

    def uniform(self, name: str, update: int, *key: int) -> float:
        if name == "exit":
            return (self.updates.index(update) + 0.5) / len(self.updates)
        return FlowSchedule.uniform(self, name, update, *key)


def passes_of(objective: Objective, role: str, schedule: FlowSchedule) -> list[ScriptPasses]:
    """Count the passes for a micro-step of a role's update, for each exit of a few-step student."""
    number = min(MOST_EXITS, len(schedule.exits())) if schedule.few else 1
    updates = tuple(map(objective.first_update, range(number)))  # each of another step
    even = _EvenExits(**{f.name: getattr(schedule, f.name) for f in fields(schedule)}, updates=updates)
    passes, carried_BCFHW = [], None
    for update in updates:
        of_one, carried_BCFHW = _play(objective, role, even, update, carried_BCFHW)
        passes.append(of_one)
    return passes


def _play(
    objective: Objective, role: str, schedule: FlowSchedule, update: int, carried_BCFHW: Tensor | None
) -> tuple[ScriptPasses, Tensor | None]:
    """Return the passes of an update, and the states from which samples go on in the next."""
    source = MicroBatches(_Zeros(), schedule, BatchSize(1, 1, 1), (1, 1, 1, 2))
    drawn, rounds, guided = objective.draw(role, source, update, 0), [], 0.0
    play = Play(objective.script(role, drawn, schedule, carried_BCFHW))
    while play.questions:
        asked = play.questions
        kinds = (Counter(q.role for q in asked if isinstance(q, kind)) for kind in (Ask, Slope, Learn))
        rounds.append(Round(*kinds))
        guided += sum(q.guided for q in asked if isinstance(q, Ask) and q.role == TEACHER)
        zeros = [torch.zeros_like(q.state.x_t_BCFHW) for q in asked]
        predicted = [Prediction(v, _Features({0: torch.zeros(1, 1, 1)})) for v in zeros]
        answers = zip(asked, zeros, predicted, strict=True)
        play.answer([v if isinstance(q, Slope) else p for q, v, p in answers])
    first = next(number for number, each in enumerate(rounds) if each.learned)
    sampled = next(number for number, each in enumerate(rounds) if each != OF_SAMPLING)
    made = ScriptPasses(sampled, rounds[sampled:first], rounds[first:], guided)
    return made, play.result[role].carried_BCFHW
