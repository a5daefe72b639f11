"""The word `auto` in a teacher JSON: it stands for the placement that planner/resolve_auto.py decides on."""

from typing import Any, ClassVar, NoReturn

from wandistiller.teacher.placements.base import Placement


class Auto(Placement):
    """A stand-in, which is never loaded."""

    memory_known: ClassVar[bool] = False

    def load(self, *args: Any) -> NoReturn:
        raise ValueError("auto stands for another placement; choose it first")

    memory = load
