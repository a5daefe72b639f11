"""Replaced functions of DeepSpeed (0.19.8): one list, applied by one call where a process begins."""

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cpuinfo
from deepspeed.ops.op_builder import PinMemoryBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.runtime import compiler
from torch.utils.cpp_extension import _get_build_directory

from wandistiller.utils.files import wait_for_lock
from wandistiller.utils.interrupts import interruptible
from wandistiller.utils.logging import log

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""Environment variable with those that CUDA code is compiled for."""


@cache
def patch_deepspeed() -> None:
    """Apply all patches to this process, before it joins others or makes an engine; again: nothing."""
    for apply in (
        read_cpu_info_in_this_process,
        leave_muon_eager,
        build_one_at_a_time,
        keep_libraries_of_pin_memory_to_itself,
    ):
        apply()


def read_cpu_info_in_this_process() -> None:
    """Let builders read /proc/cpuinfo; by itself the library starts another Python, for a second (0.19.8).

    They use the vendor, the kind of processor and its flags; elsewhere than on Linux all is as it was.
    """
    elsewhere, library = cpuinfo.get_cpu_info, cpuinfo.cpuinfo

    def read() -> dict[str, Any]:
        try:
            info = library._get_cpu_info_from_proc_cpuinfo()
            kind, bits = library._parse_arch(platform.machine())
        except AttributeError:  # they are the library's own, of version 9.0
            return elsewhere()
        return info | {"arch": kind, "bits": bits} if info.get("flags") else elsewhere()

    cpuinfo.get_cpu_info = cache(read)


def leave_muon_eager() -> None:
    """Let Muon be imported without torch's compiler: stages 1 to 3 import it for every optimizer (0.19.8).

    That took four seconds before the first step, and no JSON may ask for it.
    """
    compiler.compile = lambda: lambda function: function


def numbers_alone(architectures: str) -> str:
    """Leave out what torch knows and DeepSpeed fails to read: letters, as in 9.0a, which some containers set.

    Of names, such as Hopper, nothing is left: DeepSpeed then asks the GPUs.
    """
    numbers = re.sub(r"(\d)[a-z]", r"\1", architectures)
    return "" if re.search("[A-Za-z]", numbers.replace("PTX", "")) else numbers


@contextmanager
def sole_builder(name: str) -> Iterator[None]:
    """Wait until no other process of ours builds or loads the extension `name`; log a build and its seconds.

    The lock is the kernel's, which frees it when a process is killed. torch's own is a file that a killed
    build leaves, and on which the next waits for ever (torch 2.13): whoever holds ours may remove it.
    """
    folder = Path(_get_build_directory(name, False))
    with (folder.parent / f".{name}.lock").open("a") as file, interruptible():
        # None on a file system without locks
        if wait_for_lock(file, f"build     waiting for the process that builds or loads {name}"):
            (folder / "lock").unlink(missing_ok=True)
        began, is_built = time.monotonic(), (folder / f"{name}.so").is_file()
        if not is_built:
            log.warning("build     DeepSpeed's %s is compiled into %s: minutes, once", name, folder)
        yield
        if not is_built:
            log.warning("build     %s took %.0f s", name, time.monotonic() - began)


def build_one_at_a_time() -> None:
    """Let every build of an extension (0.19.8) go through `sole_builder`, for `numbers_alone`."""
    load = OpBuilder.jit_load

    def jit_load(builder: OpBuilder, verbose: bool = True) -> Any:
        architectures = {ARCHITECTURES: numbers_alone(os.environ.get(ARCHITECTURES, ""))}
        with sole_builder(builder.name), patch.dict(os.environ, architectures):
            return load(builder, verbose)

    OpBuilder.jit_load = jit_load


def keep_libraries_of_pin_memory_to_itself() -> None:
    """Let the extension `pin_memory` export none of the symbols of archives that the compiler links into it.

    DeepSpeed (0.19.8) loads it with RTLD_GLOBAL, for async_io. A compiler that links libstdc++ statically, as
    those of some containers do, thereby replaced streams of libraries that were loaded later: the first
    convolution of cuDNN ended in a segmentation fault.
    """
    PinMemoryBuilder.extra_ldflags = lambda _: ["-Wl,--exclude-libs,ALL"]
