"""`wandistiller doctor`: software, compiled parts and memory of this machine, and what is missing."""

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder

from wandistiller.cli.flags import DoctorFlags
from wandistiller.distributed import collectives
from wandistiller.distributed.device import emulates_bf16, on_accelerator
from wandistiller.engine.extensions import find_nvcc, reason
from wandistiller.engine.monitors import MONITORS
from wandistiller.monitoring.environment import version, versions
from wandistiller.planner.machine import memory_line, this_machine
from wandistiller.utils.system_memory import GIB

EXTRAS = {
    "accelerate": "for a teacher or text encoder by accelerate's maps: pip install accelerate",
    "peft": "for LoRA students: pip install peft",
    "torchao": 'for a teacher in 8 or 4 bits: pip install "torchao==0.18.*"',
    "av": "to read and write videos: pip install av",
    "matplotlib": "for the charts of `report`: pip install matplotlib",
} | {
    package: f"for the `{section}` section of a student JSON: pip install {package}"
    for section, package in MONITORS.items()
}
COMPILER = "CPU Adam is compiled with it. Debian, Ubuntu: apt install g++"
AIO = "a teacher or student on NVMe needs libaio; Debian, Ubuntu: apt install libaio-dev"
NVCC = "nvcc compiles a faster Adam on GPUs, and async_io"


def run(flags: DoctorFlags) -> None:
    """Describe this machine, a line each; of missing parts how to install them. Collective."""
    collectives.init()
    required, extras, parts = versions(), {name: version(name) for name in EXTRAS}, _parts()
    lines = [f"software   {', '.join(map(' '.join, required.items()))}"]
    if optional := [f"{name} {installed}" for name, installed in extras.items() if installed]:
        lines.append(f"optional   {', '.join(optional)}")
    lines += [f"missing    {name}, {EXTRAS[name]}" for name, installed in extras.items() if not installed]
    lines += parts.values()
    lines += differences(collectives.gather_objects((socket.gethostname(), required | extras | parts)))
    machine = this_machine(Path())
    gpus, n = "no GPU: ranks run on the CPU", machine.ranks
    if machine.device_free is not None:
        gpus = f"{machine.device_free / GIB:.1f} GiB free of GPU"
    host, disk = machine.host_free / GIB, machine.disk_free / GIB
    right = "right" if collectives.all_reduce_sum(collectives.rank() + 1) == n * (n + 1) / 2 else "WRONG"
    lines += [
        f"memory     {memory_line(collectives.rank())}",
        f"a node     {gpus}, {host:.1f} GiB of CPU memory free, {disk:.1f} GiB of disk",
        f"ranks      {n}, at most {machine.ranks_on_node} a node; "
        f"{collectives.backend()}, sum over them {right}",
    ]
    if emulates_bf16():
        remedy = "Without a GPU give `--mixed_precision no --teacher_dtype float32`"
        lines.append(f"slow       bf16: this CPU has no instructions for it. {remedy}")
    collectives.destroy()
    collectives.show(*lines)


def _parts() -> dict[str, str]:
    """Name -> line for the compilers and DeepSpeed's compiled parts, which are built if they are not yet."""
    on_gpu = on_accelerator()
    lines = {"nvcc": cuda_compiler(torch.version.cuda)} if on_gpu and torch.version.cuda else {}
    if not shutil.which("g++"):
        return lines | {"g++": f"missing    g++: {COMPILER}"}
    compiler = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    lines["g++"] = f"compiler   g++ {compiler}"
    builders = [("CPU Adam", CPUAdamBuilder, COMPILER), ("async_io", AsyncIOBuilder, AIO)]
    builders += [("Adam on GPUs", FusedAdamBuilder, NVCC)] if on_gpu else []
    return lines | {name: built(name, builder(), why) for name, builder, why in builders}


def built(name: str, builder: Any, why: str) -> str:
    """Build a part of DeepSpeed unless it is built; return a line, with `why` where it cannot be built."""
    try:
        if not builder.is_compatible(verbose=False):
            return f"missing    {name}: {why}"
        builder.load(verbose=False)
    except Exception as error:  # of many kinds
        return f"missing    {name} does not build: {reason(error)}"
    return f"built      {name}"


def cuda_compiler(expected: str) -> str:
    """Describe the CUDA compiler, which must have the major version of `expected`, torch's, in one line."""
    compiler = find_nvcc(expected)
    if compiler.fits:
        return f"compiler   {compiler.what}"
    toolkit = f"the CUDA toolkit {expected} (https://developer.nvidia.com/cuda-toolkit-archive)"
    return f"missing    {compiler.what}; {NVCC}: install {toolkit} and set CUDA_HOME to its folder"


def differences(ranks: list[tuple[str, dict[str, str]]]) -> list[str]:
    """List what differs between nodes, a line each, given each rank's node and name -> version or state."""
    lines = []
    for name in sorted({name for _, states in ranks for name in states}):
        nodes: dict[str, list[str]] = {}
        for node, states in ranks:
            nodes.setdefault(" ".join(states.get(name, "").split()) or "none", []).append(node)
        if len(nodes) > 1:
            where = [f"{state} on {', '.join(dict.fromkeys(names))}" for state, names in nodes.items()]
            lines.append(f"differs    {name}: {'; '.join(where)}. Give all nodes the same environment")
    return lines
