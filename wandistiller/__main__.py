"""`wandistiller COMMAND`: the command line, the exit codes, and one message for all ranks."""

import argparse
import atexit
import dataclasses
import json
import os
import shutil
import signal
import sys
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from wandistiller.config import RunConfig
from wandistiller.problems import ConfigError
from wandistiller.stopping import STOP, Stopped, stopping

if typing.TYPE_CHECKING:
    from wandistiller.failures import Failures

COMMANDS = {
    "prepare": "encode prompts, images, videos, or let the teacher make latents; fills the cache",
    "train": "distil; prepares what the cache lacks, draws pictures, exports the student",
    "export": "a checkpoint -> a diffusers pipeline folder",
    "sample": "a pipeline folder and prompts -> PNG or MP4 files and a grid",
    "evaluate": "teacher and student side by side: scores, velocity error, speed, size",
}
NEEDLESS = ("--distributed", "--multi_gpu", "--save_samples")
"""Flags of older command lines that are accepted: the launcher says the first two, and pictures are always drawn."""
OLDER = ("num_steps", "teacher_on_cpu", "sample_interval", "sample_dir")
"""Settings of older command lines that have a newer name."""


def parser() -> argparse.ArgumentParser:
    """The whole command line; every flag of prepare and train is a field of RunConfig."""
    top = _Parser("wandistiller", description="Distil a large Wan into a small student.")
    top.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher puts it before the command
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    made = {name: commands.add_parser(name, help=t, description=t, formatter_class=_Wide) for name, t in COMMANDS.items()}
    for name in ("prepare", "train"):
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
            how |= {"type": kinds[0]} | ({} if "choices" in how else {"metavar": kinds[0].__name__.upper()[0]})
        group.add_argument(f"--{f.name}", **how)


def _add_export_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument("--checkpoint", type=Path, required=True, help="an output folder (newest) or checkpoints/step_...")
    command.add_argument("--output", type=Path, required=True, help="the pipeline folder to write")
    command.add_argument("--ema", action=argparse.BooleanOptionalAction,
                         help="the averaged weights or the last; default the averaged where the run has `ema`")  # fmt: skip
    command.add_argument("--adapter", action="store_true", help="of a LoRA run the adapter alone, for load_lora_weights")
    command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))


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


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars for each small file; read when tqdm is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings of a lost connection are 30 lines of C++ each
    flags = vars(parser().parse_args(argv))
    for needless in ("--local_rank", "--num_workers", *NEEDLESS):
        flags.pop(needless.removeprefix("--"), None)
    command = flags.pop("command")
    if command == "train" and flags["replay"]:
        command = "replay"
    run = {"prepare": _run_job, "train": _run_job, "replay": _replay, "export": _export, "sample": _sample,
           "evaluate": _evaluate}[command]  # fmt: skip
    from wandistiller import distributed  # here, so that --help and a wrong flag take no seconds
    from wandistiller.failures import AGAIN, OK, Failures, tell_torchrun

    failures = Failures()
    try:
        run(command, flags, failures)
    except Stopped as stopped:
        reasons = list(dict.fromkeys(filter(None, distributed.gather_objects(stopping.reason))))
        text = f"stopped {stopped} by {', '.join(reasons)}; the same command goes on from there"
        distributed.log0(text)
        tell_torchrun(text)
        distributed.finish()
        return AGAIN
    except KeyboardInterrupt:  # before the run could save anything
        return 128 + signal.SIGINT
    except Exception as error:
        return failures.report(error)
    finally:
        stopping.release()
    return OK


def command() -> None:
    """What the shell starts.

    It leaves without the interpreter's own teardown: beside a rank that failed, or while another tears down, libraries' threads
    were seen to abort or to hang there (torch 2.13, deepspeed 0.19.8).
    """
    stopping.remember_launchers()
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run_job(command: str, flags: dict[str, Any], failures: "Failures") -> None:
    """prepare and train: check everything on every rank, agree, then start."""
    from wandistiller import distributed
    from wandistiller.auto import settle
    from wandistiller.check import read_job
    from wandistiller.files import lock, sweep
    from wandistiller.shorthands import read_run
    from wandistiller.wan import require_weights

    with distributed.same_problems():
        flags.pop("replay", None)
        run = read_run(flags.pop("recipe", None), flags)
        job = read_job(run, distributed.world_size())
    distributed.start_log(job.run.log_level)
    with distributed.same_problems():
        job = settle(job)
    if job.run.dry_run:
        for line in [*job.summary(), "dry run: nothing was loaded or written"]:
            distributed.log0(line)
        return
    first = distributed.rank() == 0
    with distributed.same_problems():
        require_weights(job.folder)
    with distributed.same_problems():  # once no rank finds anything wrong
        held = lock(job.output) if first else None
    for folder in (job.output, job.cache) if first else ():
        sweep(folder)
    stopping.install(job.output / STOP if first else None)
    distributed.init(job.run.log_level)
    distributed.set_timeout(job.run.timeout)
    failures.job = job
    distributed.explain(failures.explain)
    from wandistiller import prepare, train

    {"prepare": prepare, "train": train}[command].run(job)
    if held:
        held.close()


def _replay(_: str, flags: dict[str, Any], failures: "Failures") -> None:
    """train --replay: read that run, and repeat its step; the run itself may go on meanwhile."""
    from wandistiller import distributed, replay
    from wandistiller.auto import settle
    from wandistiller.check import read_job
    from wandistiller.wan import require_weights

    with distributed.same_problems():
        case, run = replay.read_case(flags, distributed.world_size())
        job = read_job(run, distributed.world_size())
        require_weights(job.folder)
    distributed.init(job.run.log_level)
    with distributed.same_problems():
        job = settle(job)
    distributed.set_timeout(job.run.timeout)
    failures.job = job
    distributed.explain(failures.explain)
    replay.run(job, case)
    distributed.finish()


def _export(_: str, flags: dict[str, Any], __: "Failures") -> None:
    import torch

    from wandistiller.export import export, export_adapter

    write = export_adapter if flags["adapter"] else export
    print(write(flags["checkpoint"], flags["output"], getattr(torch, flags["dtype"]), flags["ema"]))


def _sample(_: str, flags: dict[str, Any], __: "Failures") -> None:
    from wandistiller import distributed
    from wandistiller.problems import folder_problems
    from wandistiller.sample import Sampling, number_problems, read_prompts, sample
    from wandistiller.wan import open_wan

    distributed.init()
    folder = open_wan(flags["model"])
    height = flags["height"] or (64 if folder.is_tiny else 480)
    width = flags["width"] or (64 if folder.is_tiny else 832)
    how = Sampling(height=height, width=width, **{k: flags[k] for k in (
        "num_frames", "steps", "guidance_scale", "guidance_scale_2", "negative_prompt")})  # fmt: skip
    found = number_problems("sample", flags) + folder_problems("output", flags["output"])
    if found := found or folder.size_problems(height, width, flags["num_frames"]):
        raise ConfigError(*found)
    for file in sample(flags["model"], read_prompts(flags["prompts"]), flags["output"], how, flags["seed"], _dtype(flags)):
        print(file)


def _evaluate(_: str, flags: dict[str, Any], __: "Failures") -> None:
    from wandistiller import distributed
    from wandistiller.evaluate import evaluate, read_evaluation

    with distributed.same_problems():
        wanted = read_evaluation(flags, _dtype(flags), distributed.world_size())
    distributed.init()
    evaluate(wanted)
    distributed.finish()


def _dtype(flags: dict[str, Any]) -> Any:
    """--dtype; auto is bfloat16 on an accelerator and float32 on the CPU."""
    import torch

    name = flags["dtype"]
    return getattr(torch, name) if name != "auto" else torch.bfloat16 if torch.cuda.is_available() else torch.float32


if __name__ == "__main__":
    command()
