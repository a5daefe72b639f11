"""State of the process around a command: environment, standard streams, memory, exit code."""

import os
import sys
import zlib
from collections.abc import MutableMapping
from pathlib import Path

from wandistiller.distributed import launchers
from wandistiller.utils import system_memory

OK, FAULT, WRONG_INPUT, OUT_OF_MEMORY, NOT_FINITE, STORAGE, AGAIN = 0, 1, 2, 3, 4, 74, 75
"""Exit codes; the last two are EX_IOERR and EX_TEMPFAIL of sysexits.h."""
DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin on a busy CPU made a start of 2 s last 76 s
    "TQDM_DISABLE": "1",  # the libraries' progress bars for each small file; read when tqdm is imported
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # its warnings of a lost connection are 30 lines of C++ each
    "COMET_DISABLE_AUTO_LOGGING": "1",  # it would have to be imported before torch
}
"""Environment variables for libraries, where the user has set none."""


def set_defaults(env: MutableMapping[str, str]) -> None:
    """Set the environment variables that torch and other libraries read when they are imported."""
    if env.get("DS_ACCELERATOR") == "cpu":  # hide the GPUs from torch too
        env["CUDA_VISIBLE_DEVICES"] = ""
    launchers.share_cores(env, len(os.sched_getaffinity(0)))
    system_memory.set_allocators()
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):  # as launch/env.sh: built once
        folder = Path(sys.prefix) / "torch_extensions" / cpu_digest(Path("/proc/cpuinfo").read_text())
        env.setdefault("TORCH_EXTENSIONS_DIR", str(folder))
    for name, value in DEFAULTS.items():
        env.setdefault(name, value)


def cpu_digest(cpuinfo: str) -> str:
    """Hash the model and the instructions of a CPU, for which alone DeepSpeed builds (-march=native)."""
    # those of several architectures
    keys = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa", "cpu")
    lines = {line for line in cpuinfo.splitlines() if line.partition(":")[0].strip() in keys}
    return f"{zlib.crc32(''.join(sorted(lines)).encode()):08x}"


def open_streams() -> None:
    """Open the null device in place of closed standard streams, and replace what cannot be encoded.

    Otherwise the next files that are opened, such as a checkpoint's, get their numbers and libraries' output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest free number, which is this
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
