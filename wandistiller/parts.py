"""How JSONs name parts of a network; device maps, frozen parts, learning rates and LoRA targets share the notation."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from wandistiller.problems import nearest, problem


def names_part(pattern: str, name: str) -> bool:
    """Whether the words of the dotted `pattern` stand side by side in the dotted `name`, at any depth.

    A word is a name (`*` stands for any letters) or a span of numbers, `0-3` or `20-`: `proj_out`, `to_q`, `bias`,
    `blocks.0-3`, `blocks.20-.ffn`, `blocks.*.attn1.norm_q`.
    """
    wanted, given = pattern.split("."), name.split(".")
    starts = range(len(given) - len(wanted) + 1)
    return any(all(_fits(w, g) for w, g in zip(wanted, given[i:], strict=False)) for i in starts)


def _fits(wanted: str, given: str) -> bool:
    if span := re.fullmatch(r"(\d+)-(\d*)", wanted):
        return given.isdigit() and int(span[1]) <= int(given) <= int(span[2] or given)
    return fnmatchcase(given, wanted)


def any_names(patterns: Iterable[str], name: str) -> bool:
    """Whether one of the patterns names the part."""
    return any(names_part(p, name) for p in patterns)


def factor(learning_rates: dict[str, float], name: str) -> float:
    """The learning-rate factor of a parameter: that of the last pattern that names it; `*` is the rest; else 1."""
    named = [f for pattern, f in learning_rates.items() if pattern != "*" and names_part(pattern, name)]
    return [1.0, *([learning_rates["*"]] if "*" in learning_rates else []), *named][-1]


def unknown_parts(where: str, key: str, patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """A problem for every pattern that names none of `names`, with the nearest right one."""
    split = [name.split(".") for name in names]
    known = {word for words in split for word in words} | {".".join(w[:i]) for w in split for i in range(1, len(w) + 1)}
    return [
        problem(where, key, pattern, "The student has no such part."
                f"{nearest(pattern, sorted(known)) or ' Write words of a name in it, such as blocks.0-1, to_q or bias.'}")
        for pattern in patterns if not any(names_part(pattern, ".".join(words)) for words in split)
    ]  # fmt: skip
