"""Seconds that DeepSpeed (0.19.8) takes to start an engine, for things that it then does not use."""

import platform
from functools import cache
from typing import Any

from cpuinfo import cpuinfo
from deepspeed.runtime import engine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS


def read_cpu_info_in_this_process() -> None:
    """Let DeepSpeed's builders read /proc/cpuinfo; by itself the library starts another Python, for a second.

    They use the vendor, the kind of processor and its flags; elsewhere than on Linux all is as it was.
    """
    import cpuinfo as package  # the name that DeepSpeed imports it by

    elsewhere = package.get_cpu_info

    def read() -> dict[str, Any]:
        try:
            info = cpuinfo._get_cpu_info_from_proc_cpuinfo()
            kind, bits = cpuinfo._parse_arch(platform.machine())
        except AttributeError:  # they are the library's own, of version 9.0
            return elsewhere()
        return info | {"arch": kind, "bits": bits} if info.get("flags") else elsewhere()

    package.get_cpu_info = cache(read)


def leave_out_muon() -> None:
    """Let ZeRO look for a usual optimizer before it imports Muon, and with it torch's compiler."""
    supported = engine.is_zero_supported_optimizer

    def is_supported(optimizer: Any) -> bool:
        return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS or supported(optimizer)

    engine.is_zero_supported_optimizer = is_supported
