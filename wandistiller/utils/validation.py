"""Strict types of settings, checked by pydantic; its errors as messages: file, key, value, what to write."""

import re
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import TypeAdapter, ValidationError, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from wandistiller.utils.errors import Problem, nearest, problem, unknown_keys

Count = Annotated[int, Gt(0)]
Index = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Scale = Annotated[float, Ge(0), Le(1000)]
Steps = Annotated[int, Gt(0), Le(1000)]  # of the noise levels that a Wan was trained at
Text = Annotated[str, MinLen(1)]
Section = dict[str, Any]
WORDS = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "text",
    "string_too_short": "text",
    "list_type": "a list",
    "dict_type": "an object, {...}",
    "model_type": "an object, {...}",
    "too_short": "a list that is not empty",
}
"""Pydantic's error types in the words of JSON; other errors keep pydantic's message."""


def write(words: str) -> WrapValidator:
    """Annotate a type, such as a union, so that any error in it becomes the one message: Write `words`."""

    def validate(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("other", "Write {words}", {"words": words}) from None

    return WrapValidator(validate)


def types_of(settings: type) -> dict[str, Any]:
    hints = typing.get_type_hints(settings, include_extras=True)
    return {key: kind for key, kind in hints.items() if typing.get_origin(kind) is not typing.ClassVar}


def of_type(*rows: tuple[Any, str]) -> dict[str, Any]:
    """Return key -> type of a table: each row is a type and its keys, with spaces between."""
    return {key: kind for kind, keys in rows for key in keys.split()}


def check(
    where: str | Path, values: Any, types: dict[str, Any], prefix: str = ""
) -> tuple[list[str], dict[str, Any]]:
    """Check a section for unknown keys and wrong values.

    Args:
        types: key -> type; strict: a bool is no integer, an integer passes for a float, text for no number.
        prefix: the section's name with a dot behind it.

    Returns:
        All problems, and the values without any.
    """
    if not isinstance(values, dict):
        return [problem(where, prefix.rstrip("."), values, f"Write {WORDS['dict_type']}.")], {}
    known = {key: value for key, value in values.items() if key in types}
    wrong = {key: value_problems(where, {key: value}, types, prefix) for key, value in known.items()}
    problems = unknown_keys(where, values, types, prefix) + sum(wrong.values(), [])
    return problems, {key: value for key, value in known.items() if not wrong[key]}


def value_problems(
    where: str | Path, values: dict[str, Any], types: dict[str, Any], prefix: str = ""
) -> list[str]:
    """List the values of wrong type or range; keys that are not in `types` are not checked."""
    problems = []
    for key in filter(types.__contains__, values):
        try:
            _adapter(types[key]).validate_python(values[key], strict=True)
        except ValidationError as error:
            problems += error_messages(where, error, prefix + key)
    return problems


_adapter = cache(TypeAdapter)


def error_messages(where: str | Path, error: ValidationError, prefix: str = "") -> list[Problem]:
    """Format the errors that pydantic found in a section or value of the name `prefix`."""
    problems = []
    for e in error.errors(include_url=False):
        key = ".".join(filter(None, (prefix, *map(str, e["loc"]))))
        problems.append(problem(where, key, e["input"], _remedy(e)))
    return problems


def _remedy(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "Unknown key."
    if error["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"Write one of: {', '.join(known)}.{nearest(error['input'], known)}"
    if words := WORDS.get(error["type"]):
        return f"Write {words}."
    text = error["msg"].removeprefix("Value error, ")
    text = re.sub("^Write (?=greater|less)", "Write a number ", text.replace("Input should be ", "Write "))
    return f"{text}."
