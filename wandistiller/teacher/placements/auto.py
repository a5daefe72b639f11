"""The placement that stands for another one, which the planner chooses before anything is loaded."""

from typing import Any, ClassVar, NoReturn

from wandistiller.teacher.placements.base import Placement


class Auto(Placement):
    """The fastest placement that fits next to the student."""

    memory_known: ClassVar[bool] = False

    def load(self, *args: Any) -> NoReturn:
        raise ValueError("auto stands for another placement; choose it first")

    memory = load
