"""Errors with messages for people: file, key, value, remedy."""

import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

MOST_NESTED = 32
DEEP = f"more than {MOST_NESTED} levels of {{...}} and [...]. Write fewer; no setting needs them."
RECIPE = "recipe"
"""Place of a run's settings, until a command names the file that they are in."""


class Problem(str):
    """A message for a person: where it is, what was found, and what to do.

    It is its text, and knows its parts, so that a caller that knows a better place can name that.
    """

    def __new__(cls, text: str, where: str | Path = "", key: str = "", stage: str = "") -> "Problem":
        """Format a message.

        Args:
            where: file, or RECIPE.
            key: setting there that it is about.
            stage: of a recipe in stages.
        """
        stages = [f"stage {stage}"] if stage else []
        problem = super().__new__(cls, ": ".join([*stages, *filter(None, [str(where)]), text]))
        problem.parts = text, str(where), key, stage
        return problem

    def __reduce__(self) -> tuple[type["Problem"], tuple[str, ...]]:
        return Problem, self.parts  # to other ranks

    @property
    def text(self) -> str:
        """The message without its place."""
        return self.parts[0]

    @property
    def where(self) -> str:
        return self.parts[1]

    def placed(self, origins: dict[str, str], otherwise: str) -> "Problem":
        """Return the problem of a run's setting with its origin, or `otherwise`, in place of RECIPE."""
        text, where, key, stage = self.parts
        setting = re.split(r"\W", key)[0]
        return Problem(text, origins.get(setting, otherwise), key, stage) if where == RECIPE else self

    def in_stage(self, stage: str) -> "Problem":
        return Problem(*self.parts[:3], stage)


class Place(NamedTuple):
    """A file, or RECIPE, and the setting there that problems are about."""

    where: str
    key: str = ""

    def problem(self, text: str) -> Problem:
        return Problem(f"`{self.key}`: {text}" if self.key else text, *self)


class Problems(Exception):
    """Problems that a person must fix, equal ones once."""

    def __init__(self, *problems: str):
        of_type = (p if isinstance(p, Problem) else Problem(p) for p in problems)
        self.problems: list[Problem] = list(dict.fromkeys(of_type))
        super().__init__("\n".join(self.problems))


class ConfigError(Problems):
    """Wrong input."""


class NonFinite(Problems):
    """A step whose loss or gradient is not finite; no weight was changed."""


class StorageError(Problems):
    """A disk, folder or file that is full, gone or damaged; once fixed, the same command resumes the run."""


REMOVED = {"critic_warmup": " Leave it out: dmd2's critic has no head start any more."}


def problem(where: str | Path, key: str, value: object, remedy: str) -> Problem:
    """Format a problem: file, key, its value, what to write instead."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)  # a zero-width space is seen
    return Problem(f"`{key}` is {text}. {remedy}", where, key)


def unknown_keys(where: str | Path, values: dict, known: Iterable[str], prefix: str = "") -> list[str]:
    """List the keys of `values` that are not among `known`, each as a problem with the nearest known key."""
    known, problems = sorted(known), []
    for key in sorted(set(values) - set(known)):
        hint = REMOVED.get(key) or nearest(key, known) or f" Known keys: {', '.join(known)}."
        problems.append(problem(where, prefix + key, values[key], f"Unknown key.{hint}"))
    return problems


def nearest(word: object, known: Iterable[str]) -> str:
    """Return ` Did you mean ...?`, or nothing when it is no text or no known word is near."""
    near = closest(word, known)
    return "" if near is None else f" Did you mean `{near}`?"


def closest(word: object, known: Iterable[str]) -> str | None:
    near = get_close_matches(word, list(known), n=1, cutoff=0.5) if isinstance(word, str) else []
    return near[0] if near else None


@contextmanager
def readable(path: str | Path | None = None) -> Iterator[None]:
    """Raise errors of the system as wrong input, about `path` as the user wrote it, or the system's name."""
    try:
        yield
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}. Name another, or mend that."
        if error.errno == errno.ENOENT:
            why = "no such file. Fix the path."
        raise ConfigError(f"{path or error.filename}: {why}") from None


@contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Catch wrong input and add its messages to `problems`."""
    try:
        with readable():
            yield
    except ConfigError as error:
        problems += error.problems


ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+-]+):/")
"""Beginning of an address; a Path has one slash of its two."""


def folder_problems(key: str, folder: str | Path) -> list[str]:
    """List what keeps files from being written to a folder, which need not be there yet."""
    try:
        path = Path(folder).absolute()
        above = next(p for p in (path, *path.parents) if os.path.lexists(p))
        path.is_dir()  # raises where the name is too long
    except OSError as error:
        return [f"`{key}` is {folder}: {error.strerror}. Name another."]
    real = os.path.realpath(path)
    if ADDRESS.match(str(folder)):
        why = "which is an address. Name a folder of this machine, such as runs/mine, and copy it "
        why += "there afterwards."
    elif real == "/" or (_lies_in(real, "/proc", "/sys", "/dev") and not _lies_in(real, "/dev/shm")):
        why = "which is the system's own folder. Name a new folder, such as runs/mine."
    elif not above.is_dir():
        why = f"but {above} is a file. Name a folder."
    elif not os.access(above, os.W_OK):
        why = f"but {above} may not be written to. Change its permissions, or name another folder."
    else:
        return []
    return [f"`{key}` is {folder}, {why}"]


def inside_problems(key: str, folder: str | Path, inputs: dict[str, str | Path]) -> list[str]:
    """List the inputs, by setting, that `folder` is, or lies in; symbolic links are followed."""
    written, problems = os.path.realpath(folder), []
    why = "what is written there would be mixed with what is read. Name a folder outside it."
    for name, source in inputs.items():
        read = os.path.realpath(source)
        if os.path.isdir(read) and _lies_in(written, read):
            relation = "is" if written == read else "lies in"
            problems.append(f"`{key}` is {folder}, which {relation} `{name}` {source}: {why}")
    return problems


def _lies_in(path: str, *folders: str) -> bool:
    """Return whether `path` is one of `folders` or in one; all without symbolic links."""
    return any(Path(path).is_relative_to(folder) for folder in folders)


def impossible_values(path: str | Path, value: Any, key: str = "", depth: int = 0) -> list[str]:
    """List values in a JSON that no setting can have: non-finite numbers, invalid text, deep nesting."""
    if isinstance(value, float) and not math.isfinite(value):
        return [problem(path, key, value, "Write a finite number.")]
    if isinstance(value, str) and not is_text(value):
        remedy = "It holds a character that no file name or prompt can have. Remove it."
        return [problem(path, key, value, remedy)]
    if depth > MOST_NESTED:
        return [f"{path}: {DEEP}"]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    named = ((f"{key}.{k}" if key else str(k), v) for k, v in inside)
    return list(dict.fromkeys(p for name, v in named for p in impossible_values(path, v, name, depth + 1)))


def is_text(text: str) -> bool:
    """Return whether a string is valid UTF-8 and a valid name for the system: no lone surrogate, no NUL."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)
