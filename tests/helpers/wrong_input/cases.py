"""Cases of wrong input: the files of each, its command line, and what its messages must hold.

A case is a sound run with one error. `{here}` is its folder, `{wan}` the teacher, `{rank}` the rank's number.
The files *.txt here are tables of cases, a row a line.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from wandistiller.cli.main import main
from wandistiller.distributed import collectives

ENGINE = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}}
SOUND: dict[str, Any] = {
    "student.json": {"num_layers": 2},
    "engine.json": ENGINE,
    "placement.json": {"zero_optimization": {"stage": 0}},
    "prompts.txt": "a red circle\n",
}
RECIPE: dict[str, Any] = {
    "teacher_path": "{wan}",
    "data_path": "{here}/prompts.txt",
    "output_dir": "{here}/out",
    "height": 64,
    "width": 64,
    "student_config": "{here}/student.json",
    "deepspeed_config": "{here}/engine.json",
    "max_steps": 2,
    "teacher_deepspeed_config": "{here}/placement.json",
}
TABLES = Path(__file__).parent
JSONS = ("recipe.json", "student.json", "engine.json", "placement.json")


@dataclass(frozen=True)
class Case:
    """One wrong input."""

    name: str
    messages: tuple[str, ...]
    """For each message, what it must hold: the place and the remedy, with `...` for what lies between."""
    files: dict[str, Any] = field(default_factory=dict)
    """Name -> bytes, text, JSON value, or a function that makes the file, given its path and the teacher."""
    recipe: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    """The whole command line, where it is no `train` of the recipe."""

    def write(self, here: Path, wan: Path) -> list[str]:
        """Make the files; returns the command line, with `{rank}` still in it."""
        here.mkdir(parents=True)
        for name, content in (SOUND | {"recipe.json": RECIPE | self.recipe} | self.files).items():
            file = here / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(file, wan)
            elif isinstance(content, bytes):
                file.write_bytes(content)
            else:
                text = content if isinstance(content, str) else json.dumps(content)
                file.write_text(self.fill(text, here, wan), encoding="utf-8")
        words = self.argv or ("train", "--recipe", "{here}/recipe.json", *self.flags)
        return [self.fill(word, here, wan) for word in words]

    @staticmethod
    def fill(text: str, here: Path, wan: Path) -> str:
        return text.replace("{here}", str(here)).replace("{wan}", str(wan))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a command on one rank."""

    code: int
    errors: list[str]
    """The messages, one a line."""
    printed: str
    wrote: list[str]
    """Files that were not there before."""
    seconds: float


def outcome(words: list[str], here: Path) -> Outcome:
    """Run a command line in this process, as a shell would."""
    before, began = set(here.rglob("*")), time.process_time()
    with redirect_stderr(StringIO()) as output, redirect_stdout(output):
        try:
            code = main(words)
        except SystemExit as stopped:  # of argparse
            code = int(stopped.code or 0)
    printed = output.getvalue()
    errors = [line for line in printed.splitlines() if line.startswith("error: ") or ": error: " in line]
    wrote = sorted(str(file.relative_to(here)) for file in set(here.rglob("*")) - before)
    return Outcome(code, errors, printed, wrote, time.process_time() - began)


def outcomes(cases: list[tuple[Path, list[str]]]) -> list[Outcome]:
    """Run command lines, each with its folder, one by one; called on ranks by test_validate_bad_input.py."""
    of_cases = []
    for here, words in cases:
        of_cases.append(outcome([word.replace("{rank}", str(collectives.rank())) for word in words], here))
        collectives.gather_problems([])  # a barrier that joins the ranks where no case has
    return of_cases


def faults(case: Case, result: Outcome, here: Path, wan: Path) -> list[str]:
    """List what is wrong on the rank that reports."""
    expected = [case.fill(text, here, wan) for text in case.messages]
    wrong = [f"no message has: {text}" for text in expected if not any(holds(e, text) for e in result.errors)]
    if "Traceback" in result.printed:
        wrong.append("a traceback")
    if len(set(result.errors)) < len(result.errors):
        wrong.append("a message twice")
    if not all(error.endswith((".", "`?", ")")) for error in result.errors):
        wrong.append("a message that does not end")
    return wrong + silent_faults(result)


def silent_faults(result: Outcome) -> list[str]:
    """List what is wrong and must hold on every rank."""
    wrong = [] if result.code == 2 else [f"exit code {result.code}"]
    wrong += [f"wrote {result.wrote}"] if result.wrote else []
    return wrong + ([f"took {result.seconds:.0f} s"] if result.seconds > 30 else [])


def holds(message: str, expected: str) -> bool:
    """Return whether `message` has the parts of `expected`, between `...`, in their order."""
    return bool(re.search(".*".join(map(re.escape, expected.split("..."))), message))


def table(name: str, read: Callable[[str], Any] = json.loads) -> Iterator[tuple[Any, str]]:
    """Read rows of NAME.txt: what is given, `=>`, what the message must hold."""
    for line in (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        value, message = re.split(r" ?=> ", line, maxsplit=1)
        yield read(value), message


NO_CHARACTER = "It holds a character that no file name or prompt can have. Remove it."
TEXTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "not valid JSON: ...The file is empty; write one JSON object"),
    "blank": (" \n ", "not valid JSON: ...The file is empty; write one JSON object"),
    "a list": ("[]", "holds a list. Write one JSON object"),
    "a number": ("3", "holds a int. Write one JSON object"),
    "null": ("null", "holds null. Write one JSON object"),
    "a string": ('"x"', "holds a str. Write one JSON object"),
    "a comment": ('{"a": 1 // one\n}', "not valid JSON: ...line 1 column 9...no comments"),
    "a trailing comma": ('{"a": 1,\n}', "not valid JSON: ...no comma after the last value"),
    "single quotes": ("{'a': 1}", "not valid JSON: ...line 1 column 2...double quotes"),
    "cut off": ('{"a": {', "not valid JSON: ...column 8...Fix that place"),
    "two objects": ("{} {}", "not valid JSON: Extra data...Fix that place"),
    "a line break in a string": ('{"a": "x\ny"}', "not valid JSON: Invalid control character"),
    "NaN": ('{"a": {"b": [1, NaN]}}', "`a.b.1` is NaN. Write a finite number."),
    "Infinity": ('{"a": -Infinity}', "`a` is -Infinity. Write a finite number."),
    "a number past every float": ('{"a": 1e999}', "`a` is Infinity. Write a finite number."),
    "5000 digits": ('{"a": ' + "9" * 5000 + "}", "`a` is Infinity. Write a finite number."),
    "a key twice": ('{"a": 1, "b": 2, "a": 1}', "`a` is given twice. Keep one."),
    "an inner key twice": ('{"x": {"a": 1, "a": 2}}', "`a` is given twice. Keep one."),
    "lists 100000 deep": ('{"a": ' + "[" * 100_000, "more than 32 levels...Write fewer"),
    "objects 50 deep": ('{"a": ' * 50 + "1" + "}" * 50, "more than 32 levels...Write fewer"),
    "half a character": ('{"a": "\\ud800"}', f"`a` is ...{NO_CHARACTER}"),
    "a NUL": ('{"a": "b\\u0000c"}', f"`a` is ...{NO_CHARACTER}"),
    "UTF-16": ("{}".encode("utf-16"), "not valid JSON: ...Save it as UTF-8."),
    "Latin-1": ('{"a": "é"}'.encode("latin-1"), "not valid JSON: ...Save it as UTF-8."),
    "zeros": (bytes(64), "not valid JSON: ...Fix that place"),
}


def of_texts() -> Iterator[Case]:
    for name in JSONS:
        for what, (text, message) in TEXTS.items():
            yield Case(f"{name}: {what}", (f"{{here}}/{name}: {message}",), {name: text})


def of_recipes() -> Iterator[Case]:
    """Values of a recipe's keys that are of another type, or out of range."""
    for changes, message in table("recipe_values"):
        key = next(iter(changes))
        place = f"{{here}}/recipe.json: `{key}` is {json.dumps(changes[key])}. "
        yield Case(f"recipe value: {json.dumps(changes)}", (place + message,), recipe=changes)


def of_recipe_settings() -> Iterator[Case]:
    """Recipes whose settings contradict each other, the teacher or this machine."""
    for recipe, messages in table("recipe"):
        yield Case(f"recipe: {json.dumps(recipe)}", tuple(messages.split(" AND ")), recipe=recipe)
