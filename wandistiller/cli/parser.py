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
from wandistiller.config.run_config import RunConfig
from wandistiller.utils.errors import nearest
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
OLDER = ("num_steps", "teacher_on_cpu", "sample_interval", "sample_dir")
"""Settings of older command lines that have a newer name."""
DTYPES = ("bfloat16", "float16", "float32")


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
        union = typing.get_origin(hints[f.name]) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hints[f.name]) if union else (hints[f.name],)
        kind = typing.get_origin(kinds[0]) or kinds[0]
        hidden = f.name in OLDER  # accepted, but their newer names say the same
        text = argparse.SUPPRESS if hidden else f.metadata["help"]
        how: dict[str, Any] = dict(f.metadata["argparse"], default=argparse.SUPPRESS, help=text)
        if kind is bool:
            how["action"] = "store_true"
        elif kind is dict:
            how |= {"type": _json, "metavar": "JSON"}
        elif kind is list:
            how |= {"nargs": "+", "metavar": "P"}
        elif kind is typing.Literal:
            how["choices"] = typing.get_args(kinds[0])
        else:
            how = {"type": kind, "metavar": kind.__name__.upper()[0]} | how
        group.add_argument(f"--{f.name}", **how)


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
    add("--energy", type=float, metavar="F", help="share of its square to keep; 0.99")
    add("--rank", type=int, metavar="N", help="the largest rank to keep it with; 128")
    text = "float8_e4m3fn: with --format original, the blocks' matrices with a scale each"
    add("--dtype", default="bfloat16", choices=(*DTYPES, "float8_e4m3fn"), help=text)
    add("--max_shard_size", metavar="SIZE", help="largest file of a pipeline; 10GB")
    add("--push_to_hub", metavar="ORG/NAME", help="upload it too; needs HF_TOKEN")
    add("--private", action="store_true", help="make a new repository private")


def _add_sample_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", required=True, help="a diffusers Wan pipeline folder or hub id, or `tiny`")
    add("--prompts", nargs="+", required=True, help="texts, or one file of prompts")
    add("--output", type=Path, required=True, help="folder for the pictures")
    add("--height", type=int)
    add("--width", type=int)
    add("--num_frames", type=int, default=1)
    add("--steps", type=int, default=40)
    add("--guidance_scale", type=float, default=1.0, help="1 for a student that has it folded in")
    add("--guidance_scale_2", type=float)
    add("--negative_prompt")
    add("--seed", type=int, default=0, help="of the first prompt; the next gets seed + 1")
    add("--dtype", default="auto", choices=("auto", *DTYPES))


def _add_evaluate_flags(command: argparse.ArgumentParser) -> None:
    command.usage = "wandistiller evaluate --student S [--teacher_path T] [any flag below]"
    add = command.add_argument
    add("--student", "--student_path", required=True, help="an exported student, or any Wan pipeline")
    add("--teacher_path", help="default: the one it was distilled from")
    add("--teacher_deepspeed_config", metavar="FILE", help="placement of the teacher; default a WanPipeline")
    add("--prompts", nargs="+", default=["tiny:held_out"], metavar="P", help="texts, or one file of prompts")
    add("--num_prompts", type=int, default=64, metavar="N", help="spread evenly over those given; 64")
    for name in ("height", "width", "num_frames", "steps"):
        add(f"--{name}", type=int, metavar="N", help="default: what the student was made with")
    for name in ("guidance_scale", "guidance_scale_2"):
        add(f"--{name}", type=float, metavar="W", help="of the teacher; default as folded into the student")
    add("--negative_prompt", metavar="P", help="the teacher's; default as folded into the student")
    add("--clip_path", type=Path, metavar="DIR", help="a CLIP folder of transformers: scores with it too")
    add("--quick", action="store_true", help="no floor: the teacher draws once, not twice")
    add("--batch", type=int, default=8, metavar="N", help="prompts drawn at once; 8")
    add("--seed", type=int, default=0, metavar="N")
    add("--output", type=Path, metavar="DIR", help="default: next to the student")
    add("--dtype", default="auto", choices=("auto", *DTYPES))


def _add_plan_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("machine").add_argument
    text = "of a node, a rank each; default those here; 0: ranks on CPUs, one or a launcher's"
    add("--gpus", type=int, metavar="N", help=text)
    add("--gpu_memory", type=float, metavar="GIB", help="of each GPU; default what is free here")
    add("--host_memory", type=float, metavar="GIB", help="of a node; default what is free here")
    add("--disk", type=float, metavar="GIB", help="of a node, for the swap folder; default what is free here")
    add("--nodes", type=int, metavar="N", help="default 1, or a launcher's")
    text = 'such as {"tflops": 165, "pcie": 24}; see docs/memory.md'
    add("--rates", type=_json, default={}, metavar="JSON", help=text)
    add("--measure", action="store_true", help="measure this machine's rates first, some seconds")
    add("--price_per_gpu_hour", type=float, metavar="X", help="print the cost of the run too")
    add("--recommend", type=Path, metavar="FILE", help="write the recipe with the fastest JSONs that fit")


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
