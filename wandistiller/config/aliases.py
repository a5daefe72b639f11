"""Older names of settings: each becomes its recipe key before anything else reads it."""

import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from wandistiller.distributed.launchers import is_first
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.logging import log
from wandistiller.utils.validation import types_of, value_problems

TEACHER = "teacher_deepspeed_config"


def _older(key: str, means: Any = None, help: str = "") -> Any:
    """Define an older name of a recipe key.

    Args:
        means: the key's value; None: the setting's own.
        help: text of its flag; a flag without one is accepted, and not listed.
    """
    flag = {"group": "older names", "help": help, "argparse": {"metavar": "NAME"} if help else {}}
    return field(default=None, metadata=flag | {"key": key, "means": means})


@dataclass(frozen=True, kw_only=True)
class OlderSettings:
    """Keys of recipes, and flags."""

    num_steps: int | None = _older("max_steps")
    teacher_on_cpu: bool | None = _older(TEACHER, means="cpu")
    teacher_device_strategy: Literal[tuple(strategies())] | None = _older(
        TEACHER, help="the same as --teacher_deepspeed_config with the name of a shipped JSON"
    )


def without_aliases(where: str, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings with recipe keys alone, and the problems of older ones; a recipe key wins."""
    older, types = fields(OlderSettings), types_of(OlderSettings)
    values = {key: value for key, value in given.items() if key not in types}
    if problems := value_problems(where, given, types):
        return values, problems
    for name, key, means in ((f.name, f.metadata["key"], f.metadata["means"]) for f in older):
        if given.get(name) in (None, False):
            continue
        value, taken = means or given[name], values.get(key)
        if taken not in (None, value) and is_first(os.environ):
            log.warning("%s: `%s` %s is not used: `%s` is %s", where, name, given[name], key, taken)
        values.setdefault(key, value)
    return values, problems


def teacher_file(name: str) -> str:
    """Return the file of a shipped teacher JSON, by one of its names; another name is a file itself."""
    return f"ds_configs/teacher/{strategies()[name]}.json" if name in strategies() else name
