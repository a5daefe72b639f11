"""A teacher of one velocity everywhere, a batch for it, and scripts that are played with given networks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Batch, Conditioning, Prediction, State
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.objectives.objective import Objective
from wandistiller.objectives.script import TEACHER, Ask, Learn, Loss, Losses, Play, Question, Script, Slope
from wandistiller.teacher.base import Teacher

X0, NOISE = torch.zeros(2, 1, 1, 2, 2), torch.full((2, 1, 1, 2, 2), 2.0)
BATCH = Batch(
    x0_BCFHW=X0,
    noise_BCFHW=NOISE,
    x_t_BCFHW=X0,
    sigma_B=torch.tensor([0.5, 0.5]),
    conditioning=Conditioning(torch.zeros(2, 1, 1)),
    expert=Expert.HIGH_NOISE,
)


class Constant(Teacher):
    """A teacher whose velocity is one number everywhere, and whose hidden states are the blocks' numbers."""

    def __init__(self, value: float):
        self.value = value

    def predict_all(self, batches: list[Batch], blocks: tuple[int, ...]) -> list[Prediction]:
        return [
            Prediction(
                torch.full_like(batch.x_t_BCFHW, self.value),
                {k: torch.full((len(batch.sigma_B), 3, 2), float(k)) for k in blocks},
            )
            for batch in batches
        ]


def answered(
    script: Script,
    networks: dict[str, Callable[[Ask | Learn], Prediction]],
    learned: Callable[[State], Prediction],
    slope: Callable[[Slope], Tensor] | None = None,
) -> Loss | Losses:
    """Play a script with networks by role, the student where it learns, and the slope of the critic's."""

    def answer(question: Question) -> Prediction | Tensor:
        if isinstance(question, Learn) and question.role == STUDENT:
            return learned(question.state)
        return slope(question) if isinstance(question, Slope) else networks[question.role](question)

    return played(script, answer)


def played(script: Script, answer: Callable[[Question], Prediction | Tensor]) -> Any:
    """Play a script to its end; return its value."""
    play = Play(script)
    while play.questions:
        play.answer([*map(answer, play.questions)])
    return play.result


def losses(
    objective: Objective,
    teacher: Teacher,
    learned: Callable[[State], Prediction],
    states: dict[str, Batch],
    schedule: FlowSchedule = FlowSchedule(shift=3, boundary=None, seed=0),  # noqa: B008
    student: Callable[[State], Tensor] = lambda batch: torch.zeros_like(batch.x_t_BCFHW),
) -> Tensor:
    """Loss_TB of a student's update; `learned` predicts where it learns, `student` where it is asked."""
    networks = {
        TEACHER: lambda ask: teacher.predict(ask.state, ask.blocks),
        STUDENT: lambda ask: Prediction(student(ask.state)),
    }
    return answered(objective.script(STUDENT, states, schedule), networks, learned)[STUDENT].rows_TB
