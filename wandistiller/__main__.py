"""`wandistiller COMMAND`: the command line, the exit codes, and one message for all ranks."""

import atexit
import logging
import os
import signal
import sys
import typing
from typing import Any

from wandistiller import allocators, launchers, logs
from wandistiller.commandline import NEEDLESS, parser
from wandistiller.problems import ConfigError
from wandistiller.stopping import STOP, Stopped, stopping

if typing.TYPE_CHECKING:
    from wandistiller.failures import Failures

def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":  # torch, too, is to see no GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    launchers.share_cores(os.environ, len(os.sched_getaffinity(0)))
    allocators.settle()
    os.environ.setdefault("TQDM_DISABLE", "1")  # the libraries' bars for each small file; read when tqdm is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings of a lost connection are 30 lines of C++ each
    os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # what it finds by itself, for which it would come before torch
    flags = vars(parser().parse_args(argv))
    for needless in ("--local_rank", "--num_workers", *NEEDLESS):
        flags.pop(needless.removeprefix("--"), None)
    command = flags.pop("command")
    if command == "train" and flags["replay"]:
        command = "replay"
    run = {"prepare": _run_job, "train": _run_job, "replay": _replay, "export": _export, "sample": _sample,
           "evaluate": _evaluate, "plan": _plan, "report": _report, "doctor": _doctor}[command]  # fmt: skip
    from wandistiller import distributed  # here, so that --help and a wrong flag take no seconds
    from wandistiller.failures import AGAIN, OK, Failures, tell_torchrun

    failures = Failures()
    try:
        launchers.own_programs_first(os.environ)
        launchers.adopt(os.environ)
        run(command, flags, failures)
    except Stopped as stopped:
        reasons = list(dict.fromkeys(filter(None, distributed.gather_objects(stopping.reason))))
        text = f"stopped {stopped} by {', '.join(reasons)}; the same command goes on from there"
        distributed.log0(text, level=logging.WARNING)
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
    from wandistiller.written import tell

    with distributed.same_problems():
        flags.pop("replay", None)
        run = read_run(flags.pop("recipe", None), flags)
        job = read_job(run, distributed.world_size())
    logs.start(job.run.log_level)
    with distributed.same_problems():
        job = settle(job)
    if job.run.dry_run:
        for line in job.summary():
            distributed.log0(line)
        tell(job)
        distributed.log0("dry run: nothing was loaded or written")
        return
    first = distributed.rank() == 0
    with distributed.same_problems():
        require_weights(job.folder)
    with distributed.same_problems():  # once no rank finds anything wrong
        held = lock(job.output) if first else None
    for folder in (job.output, job.cache) if first else ():
        sweep(folder)
    stopping.install(job.output / STOP if first else None)
    allocators.settle_for(job.largest_network)
    distributed.init(job.run.log_level)
    logs.to_file(job.output / "logs" / f"rank_{distributed.rank()}.log")
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

    from wandistiller.export import check_export, export, export_adapter, export_original
    from wandistiller.hub import check, push

    check_export(flags)
    repository = check(flags["push_to_hub"]) if flags["push_to_hub"] else ""
    dtype, original = getattr(torch, flags["dtype"]), flags["format"] == "original"
    what = flags["checkpoint"], flags["output"], dtype, flags["ema"]
    if flags["adapter"]:
        made = export_adapter(*what, original, flags["energy"], flags["rank"], repository)
    elif original:
        made = export_original(*what, repository)
    else:
        made = [export(*what, flags["max_shard_size"], repository)]
    for path in made:
        print(path)
    if repository:
        print(push(made, repository, flags["private"]))


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


def _plan(_: str, flags: dict[str, Any], __: "Failures") -> None:
    """plan: read the run as `train` does, for the machine that the flags describe; writes nothing but the recommended recipe."""
    from wandistiller import distributed, plan

    own = {key: flags.pop(key) for key in ("gpus", "gpu_memory", "host_memory", "disk", "nodes", "rates", "measure", "recommend")}
    launched = distributed.world_size() > 1
    if launched:
        distributed.init()
    with distributed.same_problems():
        said = plan.said(own, flags)
    logs.start("info")
    for line in said:
        distributed.log0("%s", line)
    if launched:
        distributed.finish()


def _report(_: str, flags: dict[str, Any], __: "Failures") -> None:
    from wandistiller.run_report import report

    for file in report(flags["output"]):
        print(file)


def _doctor(_: str, flags: dict[str, Any], __: "Failures") -> None:
    from wandistiller import distributed
    from wandistiller.doctor import examine

    logs.start("info")
    for line in examine(**flags):
        distributed.log0("%s", line)


def _dtype(flags: dict[str, Any]) -> Any:
    """--dtype; auto is bfloat16 on an accelerator and float32 on the CPU."""
    import torch

    name = flags["dtype"]
    return getattr(torch, name) if name != "auto" else torch.bfloat16 if torch.cuda.is_available() else torch.float32


if __name__ == "__main__":
    command()
