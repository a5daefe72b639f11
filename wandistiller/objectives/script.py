"""The words in which an objective's update is written: questions to networks, and the pass that learns.

A script is a generator for one micro-step of an update. It yields a question, or a list of questions that do
not depend on each other, and is sent the output, or the list of outputs. It returns the loss of the network
that the update is for, or the losses of all that learn in it. It draws nothing and keeps nothing.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wandistiller.batch import STUDENT, Prediction, State

TEACHER = "teacher"
"""Role of the network that does not learn."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A network's prediction at a state, without gradient."""

    role: str
    state: State
    blocks: tuple[int, ...] = ()
    """Blocks of the teacher whose hidden states are needed."""
    guided: float = 1.0
    """Share of the samples that the teacher predicts with guidance, for the plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Slope:
    """The gradient in x_t_BCFHW of a number computed from a network's prediction."""

    role: str
    state: State
    value: Callable[[Prediction], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Learn:
    """A network's prediction with gradient; a script asks for all that it needs of a network at once."""

    state: State
    role: str = STUDENT


Question = Ask | Slope | Learn


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """Losses that a network learns from, and numbers for metrics."""

    rows_TB: Tensor
    """Unweighted losses, float32."""
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Numbers_B for metrics."""
    carried_BCFHW: Tensor | None = None
    """States from which the student's samples go on in its next update; None: they begin anew."""

    @classmethod
    def of_terms(cls, losses: Sequence["Loss"]) -> "Loss":
        """Join the losses of a network's terms."""
        numbers = {name: number_B for loss in losses for name, number_B in loss.numbers.items()}
        carried = (loss.carried_BCFHW for loss in losses if loss.carried_BCFHW is not None)
        return cls(torch.cat([loss.rows_TB for loss in losses]), numbers, next(carried, None))


Losses = dict[str, Loss]
"""By the role of the network that learns."""
Script = Generator[Question | list[Question], Any, Loss | Losses]


class Play:
    """A script in play, and its next questions."""

    def __init__(self, script: Script):
        self._script = script
        self.questions: list[Question] = []
        """Those that are answered next; none at the end."""
        self._is_list = False
        self.result: Any = None
        """What the script returned."""
        self._go_on(None)

    def answer(self, outputs: list[Any]) -> None:
        """Go on with the outputs for `questions`."""
        self._go_on(outputs if self._is_list else outputs[0])

    @property
    def asks(self) -> bool:
        """True if questions are next, and no pass that learns."""
        return bool(self.questions) and not self.learns

    @property
    def learns(self) -> bool:
        """True if a pass that learns is next."""
        return any(isinstance(question, Learn) for question in self.questions)

    def _go_on(self, output: Any) -> None:
        try:
            asked = self._script.send(output)
        except StopIteration as end:
            self.questions, self.result = [], end.value
            return
        self._is_list = isinstance(asked, list)
        self.questions = asked if self._is_list else [asked]


def joined(scripts: Sequence[Script]) -> Generator[list[Question], list[Any], list[Loss | Losses]]:
    """Play scripts of one micro-step side by side; a pass that learns is one for all of them.

    A state that several ask about is asked about once.
    """
    plays = [*map(Play, scripts)]
    while asking := [play for play in plays if play.questions]:
        of_round = [play for play in asking if not play.learns] or asking
        questions, indices = _once([question for play in of_round for question in play.questions])
        outputs, index = (yield questions), iter(indices)
        for play in of_round:
            play.answer([outputs[next(index)] for _ in play.questions])
    return [play.result for play in plays]


def _once(questions: list[Question]) -> tuple[list[Question], list[int]]:
    """Return different questions, and the index among them of each; of like ones the blocks are joined."""
    different: list[Question] = []
    indices: dict[Any, int] = {}
    of_each = []
    for question in questions:
        kind, state = type(question), question if isinstance(question, Slope) else question.state
        of_each.append(indices.setdefault((kind, question.role, id(state)), len(different)))
        if of_each[-1] == len(different):
            different.append(question)
        elif isinstance(question, Ask):
            known = different[of_each[-1]]
            blocks = tuple(sorted({*known.blocks, *question.blocks}))
            different[of_each[-1]] = replace(known, blocks=blocks)
    return different, of_each
