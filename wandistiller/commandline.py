"""The command line: every command's flags. Nothing heavy is imported, so that --help and a wrong flag take no seconds."""

import argparse
import dataclasses
import json
import os
import shutil
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from wandistiller import __version__
from wandistiller.config import RunConfig

COMMANDS = {
    "prepare": "encode prompts, images, videos, or let the teacher make latents; fills the cache",
    "train": "distil; prepares what the cache lacks, draws pictures, exports the student",
    "export": "a checkpoint -> a diffusers pipeline, original-Wan files (ComfyUI), or a LoRA; to the hub",
    "sample": "a pipeline folder and prompts -> PNG or MP4 files and a grid",
    "evaluate": "teacher and student side by side: scores, velocity error, speed, size",
    "plan": "bytes of each rank and the least time of a step, before anything is loaded; which JSONs fit",
    "report": "a run's curves, pictures, evaluation and settings in one HTML file",
    "doctor": "whether this machine, or the nodes of a hostfile, have what a run needs; what to install; how fast they are",
}
NEEDLESS = ("--distributed", "--multi_gpu", "--save_samples")
"""Flags of older command lines that are accepted: the launcher says the first two, and pictures are always drawn."""
OLDER = ("num_steps", "teacher_on_cpu", "sample_interval", "sample_dir")
"""Settings of older command lines that have a newer name."""


def parser() -> argparse.ArgumentParser:
    """The whole command line; every flag of prepare and train is a field of RunConfig."""
    top = _Parser("wandistiller", description="Distil a large Wan into a small student.")
    top.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher puts it before the command
    top.add_argument("--version", action="version", version=f"wandistiller {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {name: commands.add_parser(name, help=t, description=t, formatter_class=_Wide) for name, t in COMMANDS.items()}
    for name in ("prepare", "train", "plan"):
        made[name].usage = f"wandistiller {name} [--recipe FILE] [any flag below; it wins over the recipe]"
        made[name].add_argument("--recipe", metavar="FILE", help="a whole run in one JSON; its keys are the flags below")
        for flag in NEEDLESS:
            made[name].add_argument(flag, action="store_true", help=argparse.SUPPRESS)
        made[name].add_argument("--num_workers", help=argparse.SUPPRESS)  # data is encoded once, then only read
        _add_run_flags(made[name])
    made["train"].add_argument("--replay", metavar="FILE", help="repeat a step of OUTPUT/nonfinite/ alone, changing nothing")
    _add_export_flags(made["export"])
    _add_sample_flags(made["sample"])
    _add_evaluate_flags(made["evaluate"])
    _add_plan_flags(made["plan"])
    made["report"].add_argument("output", type=Path, metavar="OUTPUT", help="the folder of a run, ended or not")
    _add_doctor_flags(made["doctor"])
    return top


class _Parser(argparse.ArgumentParser):
    """Speaks once for all ranks."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(f"{message}. See {self.prog} --help.")
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


def _add_run_flags(command: argparse.ArgumentParser) -> None:
    groups: dict[str, Any] = {}
    for f in dataclasses.fields(RunConfig):
        group = groups.setdefault(f.metadata["group"], command.add_argument_group(f.metadata["group"])
                                  if f.metadata["group"] not in groups else None)  # fmt: skip
        kinds = typing.get_args(f.type) if isinstance(f.type, types.UnionType) else (f.type,)
        hidden = f.name in OLDER  # accepted, but their newer names say the same
        text = argparse.SUPPRESS if hidden else f.metadata["help"]
        how: dict[str, Any] = dict(f.metadata["argparse"], default=argparse.SUPPRESS, help=text)
        if bool in kinds:
            how["action"] = "store_true"
        elif dict in kinds and str not in kinds:
            how |= {"type": _json, "metavar": "JSON"}
        elif typing.get_origin(kinds[0]) is list:
            how |= {"nargs": "+", "metavar": "P"}
        else:
            how |= {"type": kinds[0]} | ({} if {"choices", "metavar"} & how.keys() else {"metavar": kinds[0].__name__.upper()[0]})
        group.add_argument(f"--{f.name}", **how)


def _add_export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--checkpoint", type=Path, required=True, help="an output folder (newest) or checkpoints/step_...")
    command.add_argument("--output", type=Path, required=True, help="the folder to write, or NAME.safetensors")
    command.add_argument("--format", default="diffusers", choices=("diffusers", "original"),
                         help="a pipeline folder, or original-Wan weights as ComfyUI reads them, a file an expert")  # fmt: skip
    command.add_argument("--ema", action=argparse.BooleanOptionalAction,
                         help="the averaged weights or the last; default the averaged where the run has `ema`")  # fmt: skip
    command.add_argument("--adapter", action="store_true", help="a LoRA: the run's own, or the difference to its teacher")
    command.add_argument("--energy", type=float, default=0.99, metavar="F", help="share of its square to keep; 0.99")
    command.add_argument("--rank", type=int, default=128, metavar="N", help="the largest rank to keep it with; 128")
    command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32", "float8_e4m3fn"),
                         help="float8_e4m3fn: of --format original, the blocks' matrices with a scale each")  # fmt: skip
    command.add_argument("--max_shard_size", default="10GB", metavar="SIZE", help="of a file of a pipeline; 10GB")
    command.add_argument("--push_to_hub", metavar="ORG/NAME", help="put it there too; needs HF_TOKEN")
    command.add_argument("--private", action="store_true", help="if that repository has to be made")


def _add_sample_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, help="a diffusers Wan pipeline folder or hub id, or `tiny`")
    command.add_argument("--prompts", nargs="+", required=True, help="texts, or one file of prompts")
    command.add_argument("--output", type=Path, required=True, help="folder for the pictures")
    command.add_argument("--height", type=int)
    command.add_argument("--width", type=int)
    command.add_argument("--num_frames", type=int, default=1)
    command.add_argument("--steps", type=int, default=40)
    command.add_argument("--guidance_scale", type=float, default=1.0, help="1 for a student that has it folded in")
    command.add_argument("--guidance_scale_2", type=float)
    command.add_argument("--negative_prompt")
    command.add_argument("--seed", type=int, default=0, help="of the first prompt; the next gets seed + 1")
    command.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))


def _add_evaluate_flags(command: argparse.ArgumentParser) -> None:
    command.usage = "wandistiller evaluate --student S [--teacher_path T] [any flag below]"
    command.add_argument("--student", "--student_path", required=True, help="an exported student, or any Wan pipeline")
    command.add_argument("--teacher_path", help="default: the one it was distilled from")
    command.add_argument("--teacher_deepspeed_config", metavar="FILE", help="where the teacher lives; default a WanPipeline")
    command.add_argument("--prompts", nargs="+", default=["tiny:held_out"], metavar="P", help="texts, or one file of prompts")
    command.add_argument("--num_prompts", type=int, default=64, metavar="N", help="spread evenly over those given; 64")
    for name in ("height", "width", "num_frames", "steps"):
        command.add_argument(f"--{name}", type=int, metavar="N", help="default: what the student was made with")
    for name in ("guidance_scale", "guidance_scale_2"):
        command.add_argument(f"--{name}", type=float, metavar="W", help="of the teacher; default as folded into the student")
    command.add_argument("--negative_prompt", metavar="P", help="the teacher's; default as folded into the student")
    command.add_argument("--clip_path", type=Path, metavar="DIR", help="a CLIP folder of transformers: scores with it too")
    command.add_argument("--quick", action="store_true", help="no floor: the teacher draws once, not twice")
    command.add_argument("--batch", type=int, default=8, metavar="N", help="prompts drawn at once; 8")
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument("--output", type=Path, metavar="DIR", help="default: beside the student")
    command.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))


def _add_plan_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("machine")
    group.add_argument("--gpus", type=int, metavar="N",
                       help="of a node, a rank each; default those here; 0: ranks on CPUs, one or a launcher's")  # fmt: skip
    group.add_argument("--gpu_memory", type=float, metavar="GIB", help="of each GPU; default what is free here")
    group.add_argument("--host_memory", type=float, metavar="GIB", help="of a node; default what is free here")
    group.add_argument("--disk", type=float, metavar="GIB", help="of a node, for the swap folder; default what is free here")
    group.add_argument("--nodes", type=int, metavar="N", help="default 1, or a launcher's")
    group.add_argument("--rates", type=_json, default={}, metavar="JSON", help='such as {"tflops": 165, "pcie": 24}; see README')
    group.add_argument("--measure", action="store_true", help="measure this machine's rates first, some seconds")
    group.add_argument("--recommend", type=Path, metavar="FILE", help="write the recipe with the fastest JSONs that fit")


def _add_doctor_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--hostfile", type=Path, metavar="FILE", help="look at this hostfile and log in to its nodes, no more")
    command.add_argument("--ssh_port", type=int, metavar="N", help="of those nodes")
    command.add_argument("--deepspeed", default="", metavar="FLAGS",
                         help='what its launcher is given with that file: --deepspeed="--exclude gpu03"; with --no_ssh and '
                              "--node_rank no node is logged in to")  # fmt: skip
    command.add_argument("--measure", action="store_true",
                         help="measure arithmetic, memory, disk, PCIe, link and network too, for `plan --rates`")  # fmt: skip
