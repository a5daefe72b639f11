"""Passes of a step: the objective's scripts, played on single numbers with networks whose outputs are 0."""

from collections import Counter
from dataclasses import fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from wandistiller.batch import Conditioning, Prediction
from wandistiller.data.micro_batches import MicroBatches
from wandistiller.engine.batch_size import BatchSize
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.script import Ask, Learn, Play, Slope, played

MOST_EXITS = 16
"""Calls of a few-step student that learn, of those that are counted, evenly chosen."""


class ScriptPasses(NamedTuple):
    """Passes for a micro-step of a role's update."""

    rolled_out: float
    """Forward passes of the student, as it samples."""
    before: Counter[str]
    """Predictions before the pass that learns, by role."""
    after: Counter[str]
    """Predictions after it, by role."""
    slopes: Counter[str]
    """Gradients in a network's input, by role."""
    states: int
    """States in the pass that learns."""


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


class _EvenExits(FlowSchedule):
    """A schedule whose exits are spread evenly over some consecutive updates."""

    def uniform(self, name: str, update: int, *key: int) -> float:
        number = updates_of(self)
        return (update % number + 0.5) / number if name == "exit" else super().uniform(name, update, *key)


def updates_of(schedule: FlowSchedule) -> int:
    """Return in how many updates each exit of a few-step student occurs."""
    return min(MOST_EXITS, len(schedule.exits())) if schedule.few else 1


def passes_of(objective: Objective, role: str, schedule: FlowSchedule) -> list[ScriptPasses]:
    """Count the passes for a micro-step of a role's update, for each exit of a few-step student."""
    even = _EvenExits(**{f.name: getattr(schedule, f.name) for f in fields(schedule)})
    return [_play(objective, role, even, update) for update in range(updates_of(schedule))]


def _play(objective: Objective, role: str, schedule: FlowSchedule, update: int) -> ScriptPasses:
    source = MicroBatches(_Zeros(), schedule, BatchSize(1, 1, schedule.global_batch), (1, 1, 1, 2))
    rolled_out: list[Ask] = []
    drawn = objective.draw(role, source, update, 0)
    states = played(
        objective.roll_out(role, drawn, schedule), lambda ask: rolled_out.append(ask) or _zero(ask)
    )
    counted = before, after, slopes = Counter(), Counter(), Counter()
    play, predictions, learned = Play(partial(objective.script, role, states, schedule)), before, 0
    while play.questions:
        for question in play.questions:
            if isinstance(question, Learn):
                learned, predictions = learned + 1, after
            else:
                (slopes if isinstance(question, Slope) else predictions)[question.role] += 1
        play.answer([*map(_zero, play.questions)])
    return ScriptPasses(len(rolled_out), *counted, learned)


def _zero(question: Ask | Slope | Learn) -> Prediction | Tensor:
    v_BCFHW = torch.zeros_like(question.state.x_t_BCFHW)
    return (
        v_BCFHW if isinstance(question, Slope) else Prediction(v_BCFHW, _Features({0: torch.zeros(1, 1, 1)}))
    )
