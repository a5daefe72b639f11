# ruff: noqa: E501 (a case a line)
"""The table of wrong inputs: what each case writes into a folder of its own, the command, and what must be said.

A case is a sound run with one thing spoilt. `{here}` is its folder, `{wan}` the teacher, `{rank}` the number of the rank.
"""

import json
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from wandistiller.__main__ import main

ENGINE = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
SOUND: dict[str, Any] = {
    "student.json": {"num_layers": 2}, "engine.json": ENGINE, "placement.json": {"zero_optimization": {"stage": 0}},
    "prompts.txt": "a red circle\n",
}  # fmt: skip
RECIPE: dict[str, Any] = {
    "teacher_path": "{wan}", "data_path": "{here}/prompts.txt", "output_dir": "{here}/out", "height": 64, "width": 64,
    "student_config": "{here}/student.json", "deepspeed_config": "{here}/engine.json", "max_steps": 2,
    "teacher_deepspeed_config": "{here}/placement.json",
}  # fmt: skip
JSONS = ("recipe.json", "student.json", "engine.json", "placement.json")


@dataclass(frozen=True)
class Case:
    """One wrong input."""

    name: str
    said: tuple[str, ...]
    """For each message, what it must hold: the place and the remedy, with `...` for what lies between."""
    files: dict[str, Any] = field(default_factory=dict)
    """Name -> bytes, text, or a JSON's value, beside the sound ones; or a function that makes it, given its path and the teacher."""
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
    """What a command came to, on one rank."""

    code: int
    errors: list[str]
    """The messages, one a line."""
    printed: str
    wrote: list[str]
    """Files that were not there before."""
    seconds: float


def outcome(words: list[str], here: Path) -> Outcome:
    """Run a command line in this process, as a shell would."""
    before, began = set(here.rglob("*")), time.monotonic()
    with redirect_stderr(StringIO()) as said, redirect_stdout(said):
        try:
            code = main(words)
        except SystemExit as stopped:  # of argparse
            code = int(stopped.code or 0)
    errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ") or ": error: " in line]
    wrote = sorted(str(file.relative_to(here)) for file in set(here.rglob("*")) - before)
    return Outcome(code, errors, said.getvalue(), wrote, time.monotonic() - began)


def faults(case: Case, found: Outcome, here: Path, wan: Path) -> list[str]:
    """What is not as it must be of the rank that speaks."""
    said = [case.fill(text, here, wan) for text in case.said]
    wrong = [f"nothing says: {text}" for text in said if not any(holds(error, text) for error in found.errors)]
    if "Traceback" in found.printed:
        wrong.append("a traceback")
    if len(set(found.errors)) < len(found.errors) or any(not error.endswith((".", "`?", ")")) for error in found.errors):
        wrong.append("a message twice, or none that ends")
    return wrong + silent_faults(found)


def silent_faults(found: Outcome) -> list[str]:
    """What is not as it must be on every rank."""
    wrong = [] if found.code == 2 else [f"exit code {found.code}"]
    wrong += [f"wrote {found.wrote}"] if found.wrote else []
    return wrong + ([f"took {found.seconds:.0f} s"] if found.seconds > 30 else [])


def holds(message: str, said: str) -> bool:
    """Whether the parts of `said`, between `...`, stand in `message` in their order."""
    for part in filter(None, said.split("...")):
        before, found, message = message.partition(part)
        if not found:
            return False
    return True


TEXTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "not valid JSON: ...The file is empty; write one JSON object"),
    "blank": (" \n ", "not valid JSON: ...The file is empty; write one JSON object"),
    "a list": ("[]", "holds a list. Write one JSON object"),
    "a number": ("3", "holds a int. Write one JSON object"),
    "null": ("null", "holds a NoneType. Write one JSON object"),
    "a string": ('"x"', "holds a str. Write one JSON object"),
    "a comment": ('{"a": 1 // one\n}', "not valid JSON: ...line 1 column 9...no comments"),
    "a trailing comma": ('{"a": 1,\n}', "not valid JSON: ...no comma after the last value"),
    "single quotes": ("{'a': 1}", "not valid JSON: ...line 1 column 2...double quotes"),
    "cut off": ('{"a": {', "not valid JSON: ...column 8...Mend that place"),
    "two objects": ("{} {}", "not valid JSON: Extra data...Mend that place"),
    "a line break in a string": ('{"a": "x\ny"}', "not valid JSON: Invalid control character"),
    "NaN": ('{"a": {"b": [1, NaN]}}', "`a.b.1` is NaN. Write a finite number."),
    "Infinity": ('{"a": -Infinity}', "`a` is -Infinity. Write a finite number."),
    "a number past every float": ('{"a": 1e999}', "`a` is Infinity. Write a finite number."),
    "5000 digits": ('{"a": ' + "9" * 5000 + "}", "`a` is Infinity. Write a finite number."),
    "a key twice": ('{"a": 1, "b": 2, "a": 1}', "`a` is given twice. Keep one."),
    "an inner key twice": ('{"x": {"a": 1, "a": 2}}', "`a` is given twice. Keep one."),
    "lists 100000 deep": ('{"a": ' + "[" * 100_000, "more than 32 levels...Write fewer"),
    "objects 50 deep": ('{"a": ' * 50 + "1" + "}" * 50, "more than 32 levels...Write fewer"),
    "half a character": ('{"a": "\\ud800"}', "`a` is ...It holds a character that no file name or prompt can have. Remove it."),
    "a NUL": ('{"a": "b\\u0000c"}', "`a` is ...It holds a character that no file name or prompt can have. Remove it."),
    "UTF-16": ("{}".encode("utf-16"), "not valid JSON: ...Save it as UTF-8."),
    "Latin-1": ('{"a": "é"}'.encode("latin-1"), "not valid JSON: ...Save it as UTF-8."),
    "zeros": (bytes(64), "not valid JSON: ...Mend that place"),
}


def of_texts() -> Iterator[Case]:
    for name in JSONS:
        for what, (text, said) in TEXTS.items():
            yield Case(f"{name}: {what}", (f"{{here}}/{name}: {said}",), {name: text})


WRONG_TYPES = {  # key of a recipe -> a value of another type, and what the message asks for
    "teacher_path": (5, "str"), "teacher_revision": (1, "str or None"), "data_path": (["a"], "str"), "output_dir": (None, "str"),
    "cache_dir": (True, "str or None"), "student_config": (5, "str or dict"), "deepspeed_config": ([], "str or dict"),
    "teacher_deepspeed_config": (0, "str or dict"), "batch_size": (2.0, "int or None"), "mixed_precision": (16, "str or None"),
    "gradient_checkpointing": (1, "bool"), "teacher_device_strategy": (0, "str or None"), "teacher_on_cpu": ("yes", "bool"),
    "teacher_dtype": (32, "str or None"), "objective": (1, "str or dict or list[str or dict]"), "shift": ("3", "float or None"),
    "guidance_scale": ([4], "float or None"), "guidance_scale_2": ("4", "float or None"), "negative_prompt": (None, "str"),
    "ema": ("0.9", "float or None"), "ema_start": (0.5, "int"), "learning_rates": ([1], "dict or None"),
    "frozen": ("bias", "list[str] or None"), "lora": (16, "dict or None"), "seed": ("0", "int"), "max_steps": (1.5, "int or None"),
    "num_epochs": (True, "int or None"), "expert_blocks": (None, "int"), "height": ("64", "int or None"),
    "width": (64.5, "int or None"), "num_frames": ([], "int"), "buckets": ([["a"]], "bool or list[list[int]]"),
    "video_fps": ("16", "float or None"), "strict": (0, "bool"), "rollout_steps": (20.5, "int"), "rollout_path": ("no", "bool"),
    "rollouts_per_prompt": ({}, "int"), "prepare_batch": ("4", "int"), "save_every": (1e3, "int"), "keep_checkpoints": (None, "int"),
    "sample_every": ("500", "int"), "sample_interval": (0.5, "int or None"), "sample_dir": (3, "str or None"),
    "sample_steps": ([40], "int"), "sample_prompts": ("a", "list[str] or None"), "log_level": (20, "str"), "resume": (False, "str"),
    "dry_run": ("true", "bool"),
}  # fmt: skip
WRONG_NUMBERS = {  # key of a recipe -> a value out of its range, and what the message asks for
    "batch_size": (0, "positive"), "max_steps": (-1, "positive"), "num_epochs": (0, "positive"), "expert_blocks": (0, "positive"),
    "height": (0, "positive"), "width": (-64, "positive"), "num_frames": (0, "positive"), "shift": (0, "positive"),
    "video_fps": (-16, "positive"), "rollout_steps": (0, "positive"), "rollouts_per_prompt": (0, "positive"),
    "prepare_batch": (-4, "positive"), "save_every": (0, "positive"), "keep_checkpoints": (0, "positive"),
    "sample_every": (0, "positive"), "sample_interval": (-1, "positive"), "sample_steps": (0, "positive"),
}  # fmt: skip
TOO_LARGE = {"rollout_steps": 1000, "sample_steps": 1000, "shift": 1000, "guidance_scale": 1000, "guidance_scale_2": 1000,
             "prepare_batch": 10**6, "rollouts_per_prompt": 10**6, "max_steps": 10**9, "expert_blocks": 10**6}  # fmt: skip


def of_recipes() -> Iterator[Case]:
    place = "{here}/recipe.json: "
    for key, (value, kind) in WRONG_TYPES.items():
        said = f"{place}`{key}` is {json.dumps(value)}. Write a value of type {kind}."
        yield Case(f"recipe: {key} of another type", (said,), recipe={key: value})
    for key, (value, kind) in WRONG_NUMBERS.items():
        more = {"max_steps": None} if key == "num_epochs" else {}
        yield Case(f"recipe: {key} is {value}", (f"{place}`{key}` is {value}. Write a {kind} number.",), recipe={key: value} | more)
    for key, most in TOO_LARGE.items():
        said = f"{place}`{key}` is {10**17}. Write at most {most}."
        yield Case(f"recipe: {key} is huge", (said,), recipe={key: 10**17})
    yield from (Case(f"recipe: {what}", said, recipe=recipe) for what, recipe, said in RECIPES)


RECIPES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("an unknown key", {"hieght": 64}, ("`hieght` is 64. There is no such key. Did you mean `height`?",)),
    ("a key in capitals", {"Seed": 1}, ("`Seed` is 1. There is no such key. Did you mean `seed`?",)),
    ("nothing in it", dict.fromkeys(RECIPE), ("`teacher_path` is null...str", "`data_path` is null...str", "`output_dir` is null...str",
     "`student_config` is null", "`deepspeed_config` is null", "`teacher_deepspeed_config` is null")),
    ("both lengths", {"num_epochs": 2}, ("`max_steps` and `num_epochs` are both given. Keep one.",)),
    ("num_steps against max_steps", {"num_steps": 3}, ("`num_steps` is 3. `max_steps` is 2 and means the same. Keep one.",)),
    ("two words for a placement", {"teacher_on_cpu": True, "teacher_device_strategy": "gpu0", "teacher_deepspeed_config": "x"},
     ("`teacher_on_cpu` is given too and means `cpu`. Keep one.", "`teacher_device_strategy` is gpu0...Keep one.")),
    ("lr against the engine", {"lr": 0.01}, ("`lr` is 0.01, but ...engine.json, where `optimizer.params.lr` is 0.0001. Keep one.",)),
    ("dtype unknown", {"teacher_dtype": "int8"}, ("`teacher_dtype` is 'int8'. Write one of: float32, float16, bfloat16.",)),
    ("precision unknown", {"mixed_precision": "fp8"}, ("`mixed_precision` is 'fp8'. Write one of: bf16, fp16, no.",)),
    ("strategy unknown", {"teacher_device_strategy": "gpus"}, ("`teacher_device_strategy` is 'gpus'...Did you mean `gpu`?",)),
    ("log level unknown", {"log_level": "loud"}, ("`log_level` is 'loud'. Write debug, info or warning.",)),
    ("no JSON named", {"student_config": ""}, ("`student_config` is empty. Name a JSON file.",)),
    ("a hub id that is not here", {"teacher_path": "no/such"}, ("no/such: no such folder here...offline...Fetch it elsewhere",)),
    ("a revision of a folder", {"teacher_revision": "main"}, ("`teacher_revision` is ...Only a hub id has revisions; leave it out.",)),
    ("higher than the rope", {"height": 10**6}, ("`height` is 1000000. This teacher knows places up to 1024. Write less.",)),
    ("wider than the rope", {"width": 16 * 65}, ("`width` is 1040. This teacher knows places up to 1024. Write less.",)),
    ("longer than the rope", {"num_frames": 4001}, ("`num_frames` is 4001. This teacher knows places up to 253. Write less.",)),
    ("no whole patches", {"height": 72}, ("`height` is 72. This teacher needs a multiple of 16, e.g. 64.",)),
    ("frames", {"num_frames": 4}, ("`num_frames` is 4. Write 4k + 1, e.g. 1.",)),
    ("buckets of three", {"buckets": [[64, 64, 1]]}, ("`buckets` is [64, 64, 1]. Write [height, width], in pixels, for each.",)),
    ("a bucket of no patches", {"buckets": [[64, 65]]}, ("`width` is 65. This teacher needs a multiple of 16",)),
    ("objective unknown", {"objective": "speed"}, ('`objective` is "speed". Write one of: velocity, feature, trajectory.',)),
    ("no objective", {"objective": []}, ("`objective` is []. Write one of: velocity",)),
    ("objective key", {"objective": {"name": "velocity", "wieght": 1}}, ("`objective.wieght` is 1...Did you mean `weight`?",)),
    ("a weight of zero", {"objective": {"name": "velocity", "weight": 0}}, ("`objective.weight` is 0. Write a number above 0.",)),
    ("ema of 1", {"ema": 1}, ("`ema` is 1. Write a decay between 0 and 1",)),
    ("ema_start alone", {"ema_start": 5}, ("`ema_start` is 5. It needs `ema`",)),
    ("a part that is not there", {"frozen": ["block.0"]}, ('`frozen` is "block.0". The student has no such part. Did you mean `blocks',)),
    ("all frozen", {"frozen": ["*"]}, ("`frozen` is ...Nothing is left to train; remove a part.",)),
    ("a rate below zero", {"learning_rates": {"bias": -1}}, ("`learning_rates.bias` is -1. Write a positive factor",)),
    ("a rate of text", {"learning_rates": {"bias": "x"}}, ('`learning_rates.bias` is "x". Write a positive factor',)),
    ("lora rank", {"lora": {"rank": 0}}, ("`lora.rank` is 0. Write a positive integer.",)),
    ("lora targets", {"lora": {"targets": "to_q"}}, ('`lora.targets` is "to_q". Write a list of parts',)),
    ("lora key", {"lora": {"ranks": 4}}, ("`lora.ranks` is 4. There is no such key. Did you mean `rank`?",)),
    ("expert blocks", {"expert_blocks": 3}, ("`expert_blocks` is 3, but a step has ...micro-step(s). Write a divisor of that",)),
]  # fmt: skip
