"""Patterns for parts of a network, in device maps, frozen parts, learning rates and LoRA targets."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from wandistiller.utils.errors import nearest, problem


def names_part(pattern: str, name: str) -> bool:
    """Return whether the words of the dotted `pattern` stand side by side in the dotted `name`, at any depth.

    A word is a name (`*` stands for any letters) or a span of numbers, `0-3` or `20-`: `proj_out`, `to_q`,
    `bias`, `blocks.0-3`, `blocks.20-.ffn`, `blocks.*.attn1.norm_q`.
    """
    words, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(words) + 1)
    return any(all(map(_fits, words, parts[start:])) for start in starts)


def _fits(word: str, part: str) -> bool:
    if span := re.fullmatch(r"(\d+)-(\d*)", word):
        return part.isdigit() and int(span[1]) <= int(part) <= int(span[2] or part)
    return fnmatchcase(part, word)


def any_names(patterns: Iterable[str], name: str) -> bool:
    return any(names_part(p, name) for p in patterns)


def factor(learning_rates: dict[str, float], name: str) -> float:
    """Return the learning-rate factor of a parameter: the last pattern that names it, else `*`, else 1."""
    named = [f for pattern, f in learning_rates.items() if pattern != "*" and names_part(pattern, name)]
    return named[-1] if named else learning_rates.get("*", 1.0)


def unknown_parts(where: str, key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """List the patterns that name none of `names`, each as a problem with the nearest name."""
    names, problems = list(names), []
    for pattern in patterns:
        if not any(names_part(pattern, name) for name in names):
            words = [name.split(".") for name in names]
            known = {".".join(w[:i]) for w in words for i in range(1, len(w) + 1)}.union(*words)
            example = " Write words of a name in it, such as blocks.0-1, to_q or bias."
            hint = nearest(pattern, sorted(known)) or example
            problems.append(problem(where, key, pattern, f"The student has no such part.{hint}"))
    return problems
