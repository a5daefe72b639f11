"""Older names of settings: each becomes its recipe key before anything else reads it."""

from typing import Any, Literal, NamedTuple

from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import problem
from wandistiller.utils.validation import value_problems

TEACHER = "teacher_deepspeed_config"


class Alias(NamedTuple):
    """An older setting."""

    key: str
    """The recipe key that it stands for."""
    type: Any
    means: Any = None
    """The key's value; None: the setting's own."""
    help: str = ""
    """Text of its flag; none of a flag that is accepted without being listed."""


ALIASES = {
    "num_steps": Alias("max_steps", int),
    "teacher_on_cpu": Alias(TEACHER, bool, means="cpu"),
    "teacher_device_strategy": Alias(
        TEACHER, Literal[tuple(strategies())], help=f"a shipped teacher JSON: {', '.join(strategies())}"
    ),
}


def without_aliases(where: str, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with recipe keys alone, and the problems of older ones that contradict another.

    Args:
        where: where they are given, for messages.
    """
    values, problems = {key: value for key, value in given.items() if key not in ALIASES}, []
    for name, alias in ALIASES.items():
        if given.get(name) is None:
            continue
        own = given[name]
        if wrong := value_problems(where, {name: own}, {name: alias.type}):
            problems += wrong
            continue
        if own is False:
            continue
        value = own if alias.means is None else alias.means
        if not _same(values.setdefault(alias.key, value), value):
            remedy = f"`{alias.key}` is {values[alias.key]} and means another. Keep one."
            problems.append(problem(where, name, own, remedy))
    return values, problems


def _same(given: Any, value: Any) -> bool:
    """Return whether two values of a setting mean the same: a shipped JSON has several names."""
    return given == value or (isinstance(given, str) and teacher_file(given) == teacher_file(value))


def teacher_file(name: str) -> str:
    """Return the file of a shipped teacher JSON, by one of its names; another name is a file itself."""
    return f"ds_configs/teacher/{strategies()[name]}.json" if name in strategies() else name
