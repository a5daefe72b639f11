"""`wandistiller doctor`: whether this machine has what a run needs, what is missing and how to get it, and how fast it is."""

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.utils.cpp_extension
from deepspeed.launcher.constants import PDSH_LAUNCHER
from deepspeed.launcher.runner import apply_num_nodes_and_gpus, parse_args, parse_inclusion_exclusion
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, FusedAdamBuilder
from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException, installed_cuda_version

from wandistiller import distributed, rates
from wandistiller.hardware import version, versions
from wandistiller.hostfile import env_files, read_hostfile, require_env, require_pdsh, require_reach
from wandistiller.machine import GIB, memory_line, this_machine
from wandistiller.monitors import MONITORS
from wandistiller.problems import ConfigError, problem

EXTRAS = {
    "accelerate": "for a teacher or text encoder by accelerate's maps: pip install accelerate",
    "peft": "for LoRA students: pip install peft",
    "imageio-ffmpeg": "to read and write videos: pip install imageio imageio-ffmpeg",
} | {package: f"for the `{section}` section of a student JSON: pip install {package}"
     for section, (_, package) in MONITORS.items()}  # fmt: skip
COMPILER = "CPU Adam is compiled with it. Debian, Ubuntu: apt install g++"
AIO = "a teacher or student on NVMe needs libaio; Debian, Ubuntu: apt install libaio-dev"
NVCC = "nvcc compiles Adam on GPUs, for ZeRO without offload, and async_io"
UNITS = {
    "tflops": "x 10^12 operations/s a rank", "cpu_tflops": "x 10^12 on the CPU cores of a node", "memory": "GB/s of CPU memory",
    "disk": "GB/s of disk", "pcie": "GB/s of PCIe", "link": "GB/s between ranks of a node", "network": "GB/s between nodes",
}  # fmt: skip
"""The rates, in words."""


def examine(hostfile: Path | None, ssh_port: int | None, deepspeed: str, measure: bool) -> list[str]:
    """What there is, a line each; the missing with what to do. Collective.

    Args:
        hostfile: look at it, and log in to its nodes, instead.
        deepspeed: flags that its launcher gets with that hostfile.
        measure: also the rates, which takes some seconds.
    Raises:
        ConfigError: on every rank, for a hostfile that cannot be used.
    """
    if hostfile:  # before a launch: the rest is looked at by `doctor` alone
        with distributed.same_problems():
            return [f"hostfile   {hostfile}: {_nodes(hostfile, ssh_port, deepspeed)}"]
    distributed.init()
    software, parts = _software(), _parts()
    found = [f"software   {', '.join(f'{name} {there}' for name, there in software.items() if name not in EXTRAS)}"]
    there = [f"{name} {software[name]}" for name in EXTRAS if software[name]]
    found += [f"optional   {', '.join(there)}"] if there else []
    found += [f"missing    {name}, {why}" for name, why in EXTRAS.items() if not software[name]]
    found += [line for line in parts.values() if line]
    found += differences(distributed.gather_objects((socket.gethostname(), software | parts)))
    found += [*_memory(), *slow_bf16()]
    if measure:
        found += _rates()
    distributed.finish()
    return found


def _nodes(file: Path, port: int | None, words: str) -> str:
    """What deepspeed's launcher would make of a hostfile: it is read as it does, and the nodes are asked that it would ask."""
    asked = parse_args([*words.split(), "program"])
    pool = read_hostfile(file)
    try:
        active = parse_inclusion_exclusion(pool, asked.include, asked.exclude)
    except ValueError as error:
        remedy = "Write nodes of this file, as in `gpu01@gpu02:0,1`."
        raise ConfigError(f"{file}: `{words}` cannot be followed: {error}. {remedy}") from None
    active = apply_num_nodes_and_gpus(active, asked.num_nodes, asked.num_gpus)
    if not active:
        raise ConfigError(f"{file}: `{words}` leaves no node. Leave one.")
    said = f"{len(active)} nodes, {sum(map(len, active.values()))} slots"
    if asked.no_ssh:
        if not 0 <= asked.node_rank < len(active):
            remedy = f"Write the number of this node, from 0 to {len(active) - 1}, in the order of {file}."
            raise ConfigError(problem("command line", "node_rank", asked.node_rank, remedy))
        return f"{said}; this is node {asked.node_rank}, {list(active)[asked.node_rank]}"
    require_env(env_files())
    if asked.launcher.lower() != PDSH_LAUNCHER:
        return said
    if len(active) > 1 or asked.force_multi:
        require_pdsh()
    if distributed.rank() == 0:
        require_reach(file, active, port or asked.ssh_port)
    return f"{said}; all of them let us in"


def _software() -> dict[str, str]:
    """Name -> version, empty for one that is not there."""
    return versions() | {name: version(name) for name in EXTRAS}


def _parts() -> dict[str, str]:
    """The compilers, and DeepSpeed's parts that they make, each with its line; parts are built here if they are not yet."""
    on_gpu = distributed.device().type == "cuda"
    found = {"nvcc": cuda_compiler(torch.version.cuda)} if on_gpu and torch.version.cuda else {}
    if not shutil.which("g++"):
        return found | {"g++": f"missing    g++: {COMPILER}"}
    said = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    found["g++"] = f"compiler   g++ {said}"
    builders = [("CPU Adam", CPUAdamBuilder, COMPILER), ("async_io", AsyncIOBuilder, AIO)]
    builders += [("Adam on GPUs", FusedAdamBuilder, NVCC)] if on_gpu else []
    return found | {name: built(name, builder(), why) for name, builder, why in builders}


def built(name: str, builder: Any, why: str) -> str:
    """Build a part of DeepSpeed, unless it is built; a line of how that went.

    Args:
        why: what it lacks, if its builder says that it cannot be built here.
    """
    try:
        if not builder.is_compatible(verbose=False):
            return f"missing    {name}: {why}"
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError, TypeError, MissingCUDAException, CUDAMismatchException) as error:  # TypeError:
        # async_io joins paths to the toolkit that is not there (deepspeed 0.19.8)
        return f"missing    {name} does not build: {str(error).strip().splitlines()[-1]}"
    return f"built      {name}"


def cuda_compiler(wanted: str) -> str:
    """The compiler of CUDA, which must be of torch's own major version.

    Args:
        wanted: torch's version, such as 12.8.
    """
    toolkit = f"the CUDA toolkit {wanted} (https://developer.nvidia.com/cuda-toolkit-archive)"
    remedy = f"{NVCC}: install {toolkit} and set CUDA_HOME to its folder"
    try:
        there = ".".join(map(str, installed_cuda_version()))
    except MissingCUDAException as error:
        return f"missing    nvcc: {error}; {remedy}"
    where = f"nvcc {there} in {torch.utils.cpp_extension.CUDA_HOME}"
    if there.partition(".")[0] != wanted.partition(".")[0]:
        return f"missing    nvcc of torch's CUDA {wanted}: there is {where}; {remedy}"
    return f"compiler   {where}"


def differences(said: list[tuple[str, dict[str, str]]]) -> list[str]:
    """What is not the same everywhere, a line each.

    Args:
        said: of each rank its node, and name -> version or state.
    """
    found = []
    for name in sorted({name for _, own in said for name in own}):
        nodes: dict[str, list[str]] = {}
        for node, own in said:
            nodes.setdefault(" ".join(own.get(name, "").split()) or "none", []).append(node)
        if len(nodes) > 1:
            where = "; ".join(f"{state} on {', '.join(dict.fromkeys(names))}" for state, names in nodes.items())
            found.append(f"differs    {name}: {where}. Give all nodes the same environment")
    return found


def _memory() -> list[str]:
    machine = this_machine(Path())
    gpus = f"{machine.device_free / GIB:.1f} GiB free of GPU" if machine.device_free else "no GPU: ranks run on the CPU"
    n = machine.ranks
    right = "right" if distributed.total(distributed.rank() + 1) == n * (n + 1) / 2 else "WRONG"
    joined = f"{distributed.backend()}, sum over them {right}"
    return [f"memory     {memory_line(distributed.rank())}",
            f"a node     {gpus}, {machine.host_free / GIB:.1f} GiB of CPU memory free, {machine.disk_free / GIB:.1f} GiB of disk",
            f"ranks      {n}, at most {machine.ranks_on_node} a node; {joined}"]  # fmt: skip


def slow_bf16(root: Path = Path("/")) -> list[str]:
    """A CPU that has to train, but computes bf16 by way of float32, which takes longer than float32.

    Args:
        root: the folder of proc/.
    """
    info = root / "proc/cpuinfo"  # flags: avx512_bf16, amx_bf16; on Arm bf16, svebf16
    if distributed.device().type != "cpu" or not info.is_file() or "bf16" in info.read_text():
        return []
    return ["slow       bf16: this CPU has no arithmetic of its own for it. Without a GPU give "
            "`--mixed_precision no --teacher_dtype float32`"]  # fmt: skip


def _rates() -> list[str]:
    """In words, and as `plan` takes them."""
    found = rates.measured(Path(), torch.bfloat16 if distributed.device().type == "cuda" else torch.float32)
    said = [f"{found[name]:g} {unit}" for name, unit in UNITS.items() if name in found]
    alone = [] if "link" in found or "network" in found else ["between ranks: start it with a launcher"]
    return [f"rates      {', '.join([*said, *alone])}", f"for plan   --rates '{json.dumps(found)}'"]
