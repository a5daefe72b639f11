"""Runs our commands and programs on real processes without six seconds of imports: by fork.

Launchers have tests of their own; here a process gets its rank from the environment alone.
"""

import atexit
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

LONGEST = 900
"""Seconds after which a rank is ended: a hang fails one test, not the whole suite."""


class Rank(NamedTuple):
    """One process to start."""

    env: dict[str, str]
    out: str
    """File for what it says on stdout, and on stderr."""
    err: str


@cache
def _started(simulated: bool) -> str:
    """The address of the process that forks; one for all workers, which ends with the pytest around them."""
    from ranks import environment
    from simulated import Simulated

    around = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    address, gpus = f"\0tests {around} {simulated}", Simulated(Path()).environment() if simulated else {}
    for file in ("SIMULATED_GPU_REPORTS", "SIMULATED_GPU_SHARED"):  # each rank has its own
        gpus.pop(file, None)
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError:  # another worker has started it
            return address
        listener.listen()
        env, words = environment(TQDM_DISABLE="1", **gpus), [sys.executable, __file__, str(around)]
        subprocess.Popen(words, stdin=listener, stdout=subprocess.DEVNULL, env=env)
    return address


def fork(words: list[str], cwd: Path, ranks: list[Rank], simulated: bool = False) -> list[int]:
    """Run these words, `wandistiller` or a file first, on each of `ranks`; their exit codes.

    Args:
        simulated: they have simulated GPUs, as many as their environment says.
    """
    if torch.version.cuda:  # such a build has started threads before we can fork (torch 2.11 on an H100)
        return _spawned(words, cwd, ranks)
    with socket.socket(socket.AF_UNIX) as zygote:
        zygote.connect(_started(simulated))
        zygote.sendall(f"{json.dumps([words, str(cwd), ranks])}\n".encode())
        answer = zygote.makefile().readline()
    assert answer, "the process that forks has died"
    return json.loads(answer)


def _spawned(words: list[str], cwd: Path, ranks: list[Rank]) -> list[int]:
    """The same by new processes."""
    command = [sys.executable, *(["-m"] if words[0] == "wandistiller" else []), *words]
    with ExitStack() as files:
        started = [
            subprocess.Popen(
                command,
                cwd=cwd,
                env=rank.env,
                stdin=subprocess.DEVNULL,
                stdout=files.enter_context(Path(rank.out).open("w")),
                stderr=files.enter_context(Path(rank.err).open("w")),
            )
            for rank in ranks
        ]
        return [process.wait(LONGEST) for process in started]


def _become(words: list[str], cwd: str, rank: Rank) -> None:
    """Be that rank to the end."""
    code = 1
    signal.alarm(LONGEST)
    try:
        for file, stream in ((rank.out, 1), (rank.err, 2)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.dump_traceback_later(LONGEST - 10)  # where it hangs
        os.environ.clear()
        os.environ.update(rank.env)
        os.chdir(cwd)
        sys.argv = list(words)
        if words[0] == "wandistiller":
            runpy.run_module("wandistiller", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _take_async_io_of_cpus() -> None:
    """Let async_io be the build for CPUs: the one for GPUs links libraries that torch's CPU build lacks."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import async_io, cpu

    async_io.AsyncIOBuilder.load = lambda _, verbose=False: cpu.AsyncIOBuilder().load(verbose)
    installed_ops["async_io"] = True  # no nvcc is asked for


def _threads() -> list[str]:
    """The names of this process's threads."""
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(file.read_text().strip())
    return names


def _answer(asked: socket.socket) -> NoReturn:
    """Fork the ranks that one request is for, send their exit codes, and end."""
    try:
        words, cwd, ranks = json.loads(asked.makefile().readline())
        children = []
        for rank in ranks:
            if not (pid := os.fork()):
                asked.close()
                _become(words, cwd, Rank(*rank))
            children.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        asked.sendall(f"{json.dumps(codes)}\n".encode())
    finally:
        os._exit(0)


def _serve(around: int) -> None:
    """Answer what is asked on stdin, a socket that listens, until the process `around` all ends."""
    gc.disable()
    import traces

    if traces.FOLDER in os.environ:
        traces.share()
    import peft  # noqa: F401  this and the next classes are imported by commands at their first use
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from diffusers import WanImageToVideoPipeline, WanPipeline  # noqa: F401
    from transformers import CLIPImageProcessor, CLIPVisionModel, T5TokenizerFast  # noqa: F401

    import wandistiller.cli.evaluate
    import wandistiller.training.distil  # noqa: F401  brings prepare and export
    from wandistiller.engine.patches import patch_deepspeed

    patch_deepspeed()
    CPUAdamBuilder().load()
    if "SIMULATED_GPUS" in os.environ:
        _take_async_io_of_cpus()

    gc.freeze()  # imported objects are never garbage; scanning them again takes each rank a second or more
    gc.enable()
    until = time.monotonic() + 30
    while len(threads := _threads()) > 1:  # one may be about to end, as that of matplotlib's list of fonts
        if time.monotonic() > until:
            raise RuntimeError(f"a library has started a thread, which a fork would lose: {threads}")
        time.sleep(0.1)
    listener, ended = socket.socket(fileno=0), os.pidfd_open(around)
    while ended not in select.select([listener, ended], [], [])[0]:
        asked, _ = listener.accept()
        if not os.fork():
            _answer(asked)
        asked.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
