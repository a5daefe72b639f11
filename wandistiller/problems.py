"""Wrong input: one exception for all of it, one form of message, and what no input can be."""

import errno
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

REFUSALS = {
    errno.ENOENT: "no such file. Mend the path.",
    errno.ENOTDIR: "no such file: a part of its path is no folder. Mend the path.",
    errno.EISDIR: "is a folder. Name a file.",
    errno.EACCES: "may not be read. Change its permissions, or those of the folders above it.",
    errno.ELOOP: "its symbolic links lead in a circle. Name the file itself.",
    errno.ENAMETOOLONG: "is too long a name. Give a shorter path.",
}
"""What the system said -> what is wrong and what to do."""
MOST_NESTED = 32
DEEP = f"more than {MOST_NESTED} levels of {{...}} and [...]. Write fewer; no setting needs them."


class Problems(Exception):
    """What a person must mend. Holds every problem found, each one a sentence that says where, what was found, what to do."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = list(problems)


class ConfigError(Problems):
    """Wrong input."""


class NonFinite(Problems):
    """A step whose loss or gradient is not finite, of which nothing was learned."""


class StorageError(Problems):
    """A disk or folder failed under a sound run: full, gone, changed. Once it is mended the same command goes on."""


def problem(where: str | Path, key: str, found: object, remedy: str) -> str:
    """The one form of an error message: file, key, what was found, what to write instead."""
    return f"{where}: `{key}` is {json.dumps(found, ensure_ascii=False, default=str)}. {remedy}"


def unknown_keys(where: str | Path, given: dict, known: Iterable[str], prefix: str = "") -> list[str]:
    """A problem for every key of `given` that is not among `known`, with the nearest right one."""
    known = sorted(known)
    found = []
    for key in sorted(set(given) - set(known)):
        hint = nearest(key, known) or f" Known keys: {', '.join(known)}."
        found.append(problem(where, prefix + key, given[key], f"There is no such key.{hint}"))
    return found


def nearest(word: object, known: Iterable[str]) -> str:
    """` Did you mean ...?`, or nothing when no known word is near."""
    near = get_close_matches(str(word), list(known), n=1, cutoff=0.5)
    return f" Did you mean `{near[0]}`?" if near else ""


@contextmanager
def readable(path: str | Path | None = None) -> Iterator[None]:
    """What the system refuses to read is wrong input.

    Args:
        path: its name as the user gave it; None: as the system does.
    """
    try:
        yield
    except OSError as error:
        why = REFUSALS.get(error.errno, f"it cannot be read: {error.strerror or error}. Name another.")
        raise ConfigError(f"{path or error.filename}: {why}") from None


def folder_problems(key: str, folder: str | Path) -> list[str]:
    """What keeps a folder from being made, or written to."""
    try:
        path = Path(folder).absolute()
        above = next(p for p in (path, *path.parents) if os.path.lexists(p))
        path.is_dir()  # raises where the name is too long
    except OSError as error:
        return [f"`{key}` is {folder}: {REFUSALS.get(error.errno, error.strerror)}"]
    if not above.is_dir():
        return [f"`{key}` is {folder}, but {above} is a file. Name a folder."]
    if not os.access(above, os.W_OK):
        return [f"`{key}` is {folder}, but {above} may not be written to. Change its permissions, or name another folder."]
    return []


def impossible_values(path: str | Path, value: Any, key: str = "", depth: int = 0) -> list[str]:
    """Values anywhere in a JSON that no setting can be: numbers that are not finite, broken text, endless nesting."""
    if isinstance(value, float) and not math.isfinite(value):
        return [problem(path, key, value, "Write a finite number.")]
    if isinstance(value, str) and not is_text(value):
        return [problem(path, key, value, "It holds a character that no file name or prompt can have. Remove it.")]
    if depth > MOST_NESTED:
        return [f"{path}: {DEEP}"]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    named = ((f"{key}.{k}" if key else str(k), v) for k, v in inside)
    return list(dict.fromkeys(p for name, v in named for p in impossible_values(path, v, name, depth + 1)))


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8 and handed to the system: no half characters, no NUL."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
