"""`wandistiller COMMAND`: environment, flags, the command, its exit code, and one message for all ranks."""

import atexit
import logging
import os
import signal
import sys
from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path

from wandistiller.cli.parser import IGNORED, parser
from wandistiller.distributed import launchers
from wandistiller.distributed.shutdown import Stopped, stopping
from wandistiller.utils import allocators

DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin on a busy CPU made a start of 2 s last 76 s
    "TQDM_DISABLE": "1",  # the libraries' progress bars for each small file; read when tqdm is imported
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # its warnings of a lost connection are 30 lines of C++ each
    "COMET_DISABLE_AUTO_LOGGING": "1",  # it would have to be imported before torch
}
"""Environment variables for libraries, where the user has set none."""


def set_process_defaults(env: MutableMapping[str, str]) -> None:
    """Set the environment variables that torch and other libraries read when they are imported."""
    if env.get("DS_ACCELERATOR") == "cpu":  # hide the GPUs from torch too
        env["CUDA_VISIBLE_DEVICES"] = ""
    launchers.share_cores(env, len(os.sched_getaffinity(0)))
    allocators.set_defaults()
    if sys.prefix != sys.base_prefix and os.access(
        sys.prefix, os.W_OK
    ):  # as launch/env.sh: built once for both
        env.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    for name, value in DEFAULTS.items():
        env.setdefault(name, value)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    set_process_defaults(os.environ)
    flags = vars(parser().parse_args(argv))
    flags.pop(IGNORED, None)
    command = flags.pop("command")
    # imported here, so that --help and a wrong flag take no seconds
    from wandistiller.cli.failures import AGAIN, OK, Failures
    from wandistiller.distributed import collectives
    from wandistiller.distributed.watchdog import tell_torchrun

    failures = Failures()
    try:
        launchers.own_programs_first(os.environ)
        launchers.set_rank_variables(os.environ)
        if command in ("prepare", "train"):
            from wandistiller.cli import train

            train.run(command, flags, failures)
        else:
            import_module(f"wandistiller.cli.{command}").run(flags)
    except Stopped as stopped:
        reasons = list(dict.fromkeys(filter(None, collectives.gather_objects(stopping.reason))))
        text = f"stopped {stopped} by {', '.join(reasons)}; the same command goes on from there"
        collectives.log0(text, level=logging.WARNING)
        tell_torchrun(text)
        collectives.destroy()
        return AGAIN
    except KeyboardInterrupt:  # before the run could save anything
        return 128 + signal.SIGINT
    except Exception as error:
        return failures.report(error)
    finally:
        stopping.release()
    return OK


def command() -> None:
    """Run the shell's command line and leave without the interpreter's own teardown.

    Next to a rank that failed, or while another tears down, threads of libraries were seen to abort or to
    hang in it (torch 2.13, deepspeed 0.19.8).
    """
    stopping.remember_launchers()
    code = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
