"""Cases of wrong input: the student's JSON, the DeepSpeed JSONs, flags, and other commands."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import torch
from wrong_input.cases import ENGINE, Case, table

BASES: dict[str, dict[str, Any]] = {"student": {}, "engine": ENGINE, "placement": {}}
"""Name of a JSON -> what the rows of its table change."""
GPUS = torch.cuda.device_count()
NO_GPU_999 = (
    f"there are GPUs 0 to {GPUS - 1} here." if GPUS else 'there is no GPU here; write "cpu" or "disk".'
)


def case_of(name: str, changes: dict[str, Any], message: str) -> Case:
    """A JSON with some sections changed."""
    content = {f"{name}.json": BASES[name] | changes}
    return Case(f"{name}: {json.dumps(changes)}", (f"{{here}}/{name}.json: ...{message}",), content)


def of_settings() -> Iterator[Case]:
    """Single settings of the student's JSON, its engine's and the teacher's."""
    for name in BASES:
        yield from (case_of(name, changes, message) for changes, message in table(name))
    far = {"placement": "device_map", "device_map": {"blocks": "cpu", "*": 999}}
    yield case_of("placement", {"wandistiller": far}, f"It names GPU 999, but {NO_GPU_999}")


def of_engines() -> Iterator[Case]:
    """Settings that both DeepSpeed JSONs have."""
    for name in ("engine", "placement"):
        for changes, message in table("zero_optimization"):
            key = next(iter(changes))
            section = {"zero_optimization": {"stage": 3} | changes}
            yield case_of(name, section, f"`zero_optimization.{key}...{message}")
        yield from (case_of(name, changes, message) for changes, message in table("both_engines"))


LONG_FLAGS: list[tuple[tuple[str, ...], str]] = [
    (("--height", "9" * 5000), "invalid int value"),
    (("--lora", "[" * 5000), "not valid JSON"),
    (("--data_path", "caf\udce9.txt"), "argument --data_path: ...holds a character that no file name"),
]
WORDS = {
    "SAMPLE": "sample --model {wan} --prompts a --output {here}/out --height 32 --width 32 --steps 1",
    "EVALUATE": "evaluate --student_path {wan} --teacher_path {wan}",
    "EXPORT": "export --output {here}/out --checkpoint {here}",
}
"""Sound command lines, to which rows of commands.txt add a wrong flag."""


def of_commands() -> Iterator[Case]:
    """Wrong flags of `train`, and wrong command lines of the other commands."""
    for flags, message in [*table("flags", shlex.split), *LONG_FLAGS]:
        yield Case(f"flags: {' '.join(flags)[:60]!a}", (message,), flags=tuple(flags))
    for text, messages in table("commands", str):
        first, _, more = text.partition(" ")
        words = [*shlex.split(WORDS.get(first, first)), *shlex.split(more)]
        yield Case(
            f"command: {text}", tuple(messages.split(" AND ")), argv=tuple(words) or ("--local_rank", "0")
        )
    too_long = (*shlex.split(WORDS["EXPORT"]), "--checkpoint", "{here}/" + "x" * 300)
    yield Case("command: a long path", ("File name too long. Name another",), argv=too_long)
