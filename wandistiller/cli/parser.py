"""The flags of every command. Nothing heavy is imported, so that --help and a wrong flag take no seconds."""

import argparse
import dataclasses
import json
import os
import shutil
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from wandistiller import __version__
from wandistiller.config.aliases import ALIASES
from wandistiller.config.run_config import RunConfig
from wandistiller.utils.errors import nearest
from wandistiller.utils.files import PATH_ENDS
from wandistiller.utils.registry import names_in

COMMANDS = {
    "prepare": "encode prompts, images, videos, or let the teacher make latents; fills the cache",
    "train": "distil; prepares what the cache lacks, draws pictures, exports the student",
    "export": "a checkpoint -> a diffusers pipeline, original-Wan files (ComfyUI), or a LoRA; to the hub",
    "sample": "a pipeline folder and prompts -> PNG or MP4 files and a grid",
    "evaluate": "teacher and student side by side: scores, velocity error, speed, size",
    "plan": "memory, disk, hours and cost of a run, before anything is loaded; which JSONs fit",
    "report": "a run's curves, pictures, evaluation and settings in one HTML file",
    "doctor": "whether this machine has what a run needs; what to install; how fast it is",
}
IGNORED = "ignored"
"""Destination of flags that are accepted and change nothing."""
UNLISTED = ("sample_interval", "sample_dir")
"""Settings of older command lines that are accepted, and not in the help."""
DTYPES = ("bfloat16", "float16", "float32")
AUTO_DTYPE = "of the arithmetic; auto: bfloat16 on a GPU, float32 on the CPU"
SHARED = "ranks that compute each sample together, for long videos; a divisor of ranks, heads and patches"
METAVARS = {int: "INT", float: "NUMBER", str: "TEXT", dict: "JSON", list: "TEXT", Path: "PATH"}
"""Type of a flag -> the word for its value in the help."""


def parser() -> argparse.ArgumentParser:
    """Build the whole command line; every flag of prepare and train is a field of RunConfig."""
    top = _Parser("wandistiller", description="Distil a large Wan into a small student.", allow_abbrev=False)
    _ignore_local_rank(top)
    top.add_argument("--version", action="version", version=f"wandistiller {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        how: dict[str, Any] = {"help": text, "description": text, "formatter_class": _Wide}
        command = commands.add_parser(name, allow_abbrev=False, **how)
        _ignore_local_rank(command)
        if name in ("prepare", "train", "plan"):
            _add_run_flags(command, name)
        if add := OF_COMMAND.get(name):
            add(command)
    return top


def _ignore_local_rank(command: argparse.ArgumentParser) -> None:
    """Accept the flag of launchers, before the command (deepspeed) or after; the environment has it too."""
    command.add_argument(
        "--local_rank", "--local-rank", dest=IGNORED, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


class _Parser(argparse.ArgumentParser):
    """Print an error once for all ranks."""

    def parse_known_args(self, *given: Any, **more: Any) -> tuple[argparse.Namespace, list[str]]:
        """Raise an error at an unknown flag, with the nearest that there is."""
        known, extras = super().parse_known_args(*given, **more)
        for word in extras:
            flag = word.partition("=")[0]
            near = nearest(flag, [f for f in self._option_string_actions if f.startswith("--")])
            self.error(f"unrecognized arguments: {' '.join(extras)}.{near}".removesuffix("."))
        return known, extras

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            end = "" if message.endswith("?") else "."
            super().error(f"{message}{end} See {self.prog} --help.")
        self.exit(2)


class _Wide(argparse.HelpFormatter):
    """One line a flag, where the terminal allows it."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=34, width=max(120, shutil.get_terminal_size().columns))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Return the text with the default, unless it has a word about that itself."""
        return _with_default(action.help, action.default)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return METAVARS.get(action.type or str, "TEXT")


def _with_default(text: str | None, default: Any) -> str | None:
    """Return a flag's help with its default value, unless it has a word about that itself."""
    nothing = default is None or default is False or default in ("", {}, argparse.SUPPRESS)
    if nothing or not text or text == argparse.SUPPRESS or "default" in text:
        return text
    value = " ".join(default) if isinstance(default, list) else default
    return f"{text}; default {value:g}" if isinstance(value, float) else f"{text}; default {value}"


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None


def _add_run_flags(command: argparse.ArgumentParser, name: str) -> None:
    rule = "it wins over the recipe, not over a named DeepSpeed JSON"
    command.usage = f"wandistiller {name} [--recipe FILE] [any flag below; {rule}]"
    recipe = "a whole run in one JSON; its keys are the flags below"
    command.add_argument("--recipe", metavar="FILE", help=recipe)
    ignored: dict[str, Any] = {"dest": IGNORED, "help": argparse.SUPPRESS}  # of older command lines
    # launchers imply the first two; samples are always drawn; data is encoded once, then only read
    command.add_argument("--distributed", "--multi_gpu", "--save_samples", action="store_true", **ignored)
    command.add_argument("--num_workers", **ignored)
    groups: dict[str, Any] = {}
    # without the limits, which are checked together with the recipe's values
    hints = typing.get_type_hints(RunConfig)
    for f in dataclasses.fields(RunConfig):
        title = f.metadata["group"]
        group = groups[title] = groups.get(title) or command.add_argument_group(title)
        group.add_argument(f"--{f.name}", **_of_field(f, hints[f.name]))
    for key, alias in ALIASES.items():
        how = _of_type(key, alias.type) | {"help": alias.help or argparse.SUPPRESS}
        groups["engines"].add_argument(f"--{key}", **how | ({"metavar": "NAME"} if alias.help else {}))


def _of_field(f: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """Return argparse's settings of the flag of a RunConfig field."""
    text = argparse.SUPPRESS if f.name in UNLISTED else _with_default(f.metadata["help"], f.default)
    return _of_type(f.name, hint) | f.metadata["argparse"] | {"help": text}


def _of_type(name: str, hint: Any) -> dict[str, Any]:
    """Return argparse's settings of the flag of a setting, by its type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    kind = typing.get_origin(kinds[0]) or kinds[0]
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    if kind is bool:
        return how | {"action": "store_true"}
    if kind is typing.Literal:
        return how | {"choices": typing.get_args(kinds[0])}
    metavar = METAVARS[Path if name.endswith(PATH_ENDS) else kind]
    if kind is list:
        return how | {"nargs": "+", "metavar": metavar}
    return how | {"type": _json if kind is dict else kind, "metavar": metavar}


def _add_export_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--checkpoint", type=Path, required=True, help="an output folder (newest) or checkpoints/step_...")
    add("--output", type=Path, required=True, help="the folder to write, or NAME.safetensors")
    formats = names_in("wandistiller.export.formats")
    text = (
        "diffusers: a pipeline folder; original: original-Wan weights as ComfyUI reads them, a file an expert"
    )
    add("--format", default="diffusers", choices=formats, help=f"{text}; lora: as --adapter")
    text = "the averaged weights or the last; default the averaged where the run has `ema`"
    add("--ema", action=argparse.BooleanOptionalAction, help=text)
    text = "a LoRA: the run's own, or the difference to its teacher; with --format original for ComfyUI"
    add("--adapter", action="store_true", help=text)
    add("--energy", type=float, help="share of its square to keep; default 0.99")
    add("--rank", type=int, help="the largest rank to keep it with; default 128")
    text = "float8_e4m3fn: with --format original, the blocks' matrices with a scale each"
    add("--dtype", default="bfloat16", choices=(*DTYPES, "float8_e4m3fn"), help=text)
    add("--max_shard_size", metavar="SIZE", help="largest file of a pipeline; default 10GB")
    add("--push_to_hub", metavar="ORG/NAME", help="upload it too; needs HF_TOKEN")
    add("--private", action="store_true", help="make a new repository private")


def _add_sample_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", required=True, help="a diffusers Wan pipeline, a run, a hub id, or `tiny`")
    add("--prompts", nargs="+", required=True, help="texts, or one file of prompts")
    add("--output", type=Path, required=True, help="folder for the pictures")
    for name in ("height", "width"):
        add(f"--{name}", type=int, help="pixels; default what the pipeline was made for")
    add("--num_frames", type=int, default=1, help="4k+1; 1 is an image")
    add("--steps", type=int, help="sampling steps; default those that a student is trained for, else 40")
    add("--guidance_scale", type=float, default=1.0, help="1 for a student that has it folded in")
    add("--guidance_scale_2", type=float, help="of the low-noise expert; default --guidance_scale")
    add("--negative_prompt", help="of guidance above 1; default none")
    add("--seed", type=int, default=0, help="of the first prompt; the next gets seed + 1")
    add("--context_parallel", type=int, default=1, help=SHARED)
    add("--dtype", default="auto", choices=("auto", *DTYPES), help=AUTO_DTYPE)


def _add_evaluate_flags(command: argparse.ArgumentParser) -> None:
    command.usage = "wandistiller evaluate --student_path S [--teacher_path T] [any flag below]"
    add = command.add_argument
    text = "an exported student, the folder of a run that has one, or any Wan pipeline"
    add("--student_path", "--student", dest="student", required=True, help=text)
    add("--teacher_path", help="default: the one it was distilled from")
    add("--teacher_deepspeed_config", metavar="FILE", help="placement of the teacher; default a WanPipeline")
    add("--prompts", nargs="+", default=["tiny:held_out"], help="texts, or one file of prompts")
    add("--num_prompts", type=int, default=64, help="spread evenly over those given")
    for name in ("height", "width", "num_frames"):
        add(f"--{name}", type=int, help="default: what the student was made with")
    text = "sampling steps of both; of several numbers (1 2 4 40) also a table and a picture by steps"
    add("--steps", type=int, nargs="+", help=f"{text}; default what each was made with")
    for name in ("guidance_scale", "guidance_scale_2"):
        add(f"--{name}", type=float, help="of the teacher; default as folded into the student")
    add("--negative_prompt", help="the teacher's; default as folded into the student")
    add("--clip_path", type=Path, help="a CLIP folder of transformers: scores with it too")
    add("--quick", action="store_true", help="draw each prompt once: no floor, no variety")
    add("--batch", type=int, default=8, help="prompts drawn at once")
    add("--seed", type=int, default=0, help="of the first prompt; the next gets seed + 1")
    add("--output", type=Path, help="folder; default: next to the student")
    add("--context_parallel", type=int, default=1, help=SHARED)
    add("--dtype", default="auto", choices=("auto", *DTYPES), help=AUTO_DTYPE)


def _add_plan_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("machine").add_argument
    text = "of a node, a rank each; default those here; 0: ranks on CPUs, one or a launcher's"
    add("--gpus", type=int, help=text)
    add("--gpu_memory", type=float, metavar="GIB", help="of each GPU; default what is free here")
    add(
        "--gpu_name",
        metavar="NAME",
        help="of each GPU, such as H100, for its usual rates; default by its memory",
    )
    add("--host_memory", type=float, metavar="GIB", help="of a node; default what is free here")
    add("--disk", type=float, metavar="GIB", help="of a node, for the swap folder; default what is free here")
    add("--nodes", type=int, help="default 1, or a launcher's")
    text = 'such as {"tflops": 100, "pcie": 24}; see docs/memory.md'
    add("--rates", type=_json, default={}, metavar="JSON", help=text)
    add("--measure", action="store_true", help="measure this machine's rates first, some seconds")
    add("--price_per_gpu_hour", type=float, help="print the cost of the run too")
    add("--recommend", type=Path, metavar="FILE", help="write the recipe with the simplest JSONs that fit")


def _add_report_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("output", type=Path, metavar="OUTPUT", help="the folder of a run, ended or not")


def _add_doctor_flags(command: argparse.ArgumentParser) -> None:
    text = "measure arithmetic, memory, disk, PCIe, link and network too, for `plan --rates`"
    command.add_argument("--measure", action="store_true", help=text)


OF_COMMAND: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "export": _add_export_flags,
    "sample": _add_sample_flags,
    "evaluate": _add_evaluate_flags,
    "plan": _add_plan_flags,
    "report": _add_report_flags,
    "doctor": _add_doctor_flags,
}
"""Flags of the commands other than prepare and train."""
