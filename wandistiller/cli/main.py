"""`wandistiller COMMAND`: environment, flags, the command, its exit code, and one message for all ranks."""

import atexit
import faulthandler
import gc
import logging
import os
import re
import sys
from importlib import import_module

from wandistiller.cli import process
from wandistiller.cli.parser import read
from wandistiller.distributed import launchers
from wandistiller.distributed.shutdown import Stopped, stopping
from wandistiller.utils import interrupts
from wandistiller.utils.logging import drop_noise, setup_logging

READING = "reading   the recipe, the teacher's configs and the data"
"""Printed before libraries are imported and all is checked: seconds, on a busy machine a minute."""
MEMORY = re.compile("failed to map segment|allocate memory")
"""Errors of the dynamic linker, when there is not enough memory for a library."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    process.set_defaults(os.environ)
    drop_noise()
    command, flags = read(argv)
    if command in ("prepare", "train", "plan") and launchers.is_first(os.environ):
        print(READING, file=sys.stderr, flush=True)
    try:  # imported here, so that --help and a wrong flag take no seconds
        from wandistiller.cli.failures import Failures
        from wandistiller.distributed import collectives
        from wandistiller.distributed.progress import break_silence
        from wandistiller.distributed.watchdog import tell_torchrun
        from wandistiller.engine.patches import patch_deepspeed
    except (ImportError, MemoryError, OSError) as error:
        return _not_loaded(error)

    patch_deepspeed()
    failures, silence = Failures(), None
    try:
        launchers.own_programs_first(os.environ)
        launchers.set_rank_variables(os.environ)
        setup_logging("info")
        silence = break_silence()
        trains = command in ("prepare", "train")
        module = import_module(f"wandistiller.cli.{'train' if trains else command}")
        if not gc.isenabled():  # what was imported is never garbage, and is scanned no more
            gc.freeze()
            gc.enable()
        module.run(*((command, flags, failures) if trains else (flags,)))
    except Stopped as stopped:
        reasons = list(dict.fromkeys(filter(None, collectives.gather_objects(stopping.reason))))
        text = f"stopped {stopped} by {', '.join(reasons)}; {failures.going_on()}"
        collectives.log0(text, level=logging.WARNING)
        tell_torchrun(text)
        collectives.destroy()
        return process.AGAIN
    except (Exception, interrupts.Interrupted) as error:
        return failures.report(error)
    finally:
        stopping.release()
        if silence:
            silence.set()
    return process.OK


def _not_loaded(error: BaseException) -> int:
    """Report a library that cannot be imported; return the exit code."""
    reason = [line for line in f"{error}".splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, MemoryError) or MEMORY.search(str(error)):
        print(f"Out of memory while libraries are loaded: {reason[-1]}", file=sys.stderr)
        return process.OUT_OF_MEMORY
    remedy = "Install the package with its requirements: pip install -e . in its folder, or launch/env.sh"
    print(f"error: a library does not load: {reason[-1]}. {remedy}.", file=sys.stderr)
    return process.FAULT


def command() -> None:
    """Run the shell's command line and leave without the interpreter's own teardown.

    Next to a rank that failed, or while another tears down, threads of libraries were seen to abort or to
    hang in it (torch 2.13, deepspeed 0.19.8).
    """
    gc.disable()  # until all is imported: a million objects, which would be scanned again and again
    process.open_streams()
    faulthandler.enable()  # says where a library crashed, such as an extension that was compiled here
    interrupts.raise_on_signals()
    stopping.remember_launchers()
    try:
        # before it joins the others: a process that has joined them holds the port itself
        wrong = launchers.environment_problems(os.environ)
        for problem in wrong:
            print(f"error: {problem}", file=sys.stderr)
        code = process.WRONG_INPUT if wrong else main()
    except interrupts.Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        code = interrupted.exit_code
    interrupts.default_signals()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
