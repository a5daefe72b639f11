"""Kinds of values that a JSON may hold under a key, each named by the words that tell people what to write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from wandistiller.problems import problem


def _whole(value: Any) -> bool:
    """DeepSpeed's JSONs write 5e8 for a whole number."""
    return type(value) is int or (type(value) is float and value.is_integer())


def _number(value: Any) -> bool:
    return type(value) in (int, float)


KINDS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda v: type(v) is bool,
    "a whole number": _whole,
    "a whole number, 0 or more": lambda v: _whole(v) and v >= 0,
    "a positive whole number": lambda v: _whole(v) and v > 0,
    "a whole number from 1 to 10000000000": lambda v: _whole(v) and 0 < v <= 10**10,
    "an even whole number from 2 to 10000000000": lambda v: _whole(v) and 0 < v <= 10**10 and v % 2 == 0,
    "a positive integer": lambda v: type(v) is int and v > 0,
    "an integer from 1 to 1024": lambda v: type(v) is int and 1 <= v <= 1024,
    "an even integer from 2 to 1024": lambda v: type(v) is int and 2 <= v <= 1024 and v % 2 == 0,
    "an integer from 1 to 1000000": lambda v: type(v) is int and 1 <= v <= 10**6,
    "three positive integers": lambda v: isinstance(v, list) and len(v) == 3 and all(type(n) is int and n > 0 for n in v),
    "a number, 0 or more": lambda v: _number(v) and v >= 0,
    "a positive number": lambda v: _number(v) and v > 0,
    "a number from 0 to 1": lambda v: _number(v) and 0 <= v <= 1,
    "a number between 0 and 1": lambda v: _number(v) and 0 < v < 1,
    "a positive number up to 1000": lambda v: _number(v) and 0 < v <= 1000,
    "two numbers from 0 to below 1, such as [0.9, 0.999]": lambda v: (
        isinstance(v, list) and len(v) == 2 and all(_number(b) and 0 <= b < 1 for b in v)),
    "a list of numbers": lambda v: isinstance(v, list) and all(_number(n) for n in v),
    "a list of positive numbers": lambda v: isinstance(v, list) and all(_number(n) and n > 0 for n in v),
    "a list": lambda v: isinstance(v, list),
    "an object, {...}": lambda v: isinstance(v, dict),
    "text": lambda v: isinstance(v, str) and bool(v),
    "null": lambda v: v is None,
    "log or linear": lambda v: v in ("log", "linear"),
    "WARN, IGNORE or FAIL": lambda v: isinstance(v, str) and v.upper() in ("WARN", "IGNORE", "FAIL"),
    "debug, info, warning, error or critical": lambda v: v in ("debug", "info", "warning", "error", "critical"),
    "fp32, fp16 or bf16": lambda v: v in ("fp32", "fp16", "bf16", "float32", "float16", "half", "bfloat16"),
}  # fmt: skip
"""What to write -> whether a value is that."""


def kind_problems(where: str | Path, given: dict[str, Any], kinds: dict[str, str], prefix: str = "") -> list[str]:
    """A problem for every value that is of another kind than its key's.

    Args:
        kinds: what to write -> the keys, with spaces between, that it is written for; keys that are not given are passed over.
    """
    return [
        problem(where, prefix + key, given[key], f"Write {kind}.")
        for kind, keys in kinds.items() for key in keys.split() if key in given and not KINDS[kind](given[key])
    ]  # fmt: skip
