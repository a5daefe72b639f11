"""`wandistiller doctor`: whether this machine has what a run needs, what is missing and how to get it, and how fast it is."""

import shutil
import subprocess
from pathlib import Path

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

from wandistiller import distributed, rates
from wandistiller.hardware import version, versions
from wandistiller.hostfile import read_hostfile, require_reach
from wandistiller.machine import GIB, memory_line, this_machine
from wandistiller.monitors import MONITORS

EXTRAS = {
    "peft": "for LoRA students: pip install peft",
    "imageio-ffmpeg": "to read and write videos: pip install imageio imageio-ffmpeg",
} | {package: f"for the `{section}` section of a student JSON: pip install {package}"
     for section, (_, package) in MONITORS.items()}  # fmt: skip
COMPILER = "g++: CPU Adam is compiled with it. Debian, Ubuntu: apt install g++"
AIO = "a teacher or student on NVMe needs libaio; Debian, Ubuntu: apt install libaio-dev"


def examine(hostfile: Path | None, ssh_port: int | None, measure: bool) -> list[str]:
    """What there is, a line each; the missing with what to do. Collective.

    Args:
        hostfile: also read it, and log in to its nodes.
        measure: also the rates, which takes some seconds.
    Raises:
        ConfigError: on every rank, for a hostfile that cannot be used.
    """
    with distributed.same_problems():
        nodes = _nodes(hostfile, ssh_port) if hostfile and distributed.rank() == 0 else None
    if nodes:  # before a launch: the rest is looked at by `doctor` alone
        return [f"hostfile   {hostfile}: {len(nodes)} nodes, {sum(nodes.values())} slots; all of them let us in"]
    distributed.init()
    found = [*_software(), *_operators(), *_memory(), *slow_bf16()]
    if measure:
        found += _rates()
    distributed.finish()
    return found


def _nodes(file: Path, port: int | None) -> dict[str, int]:
    nodes = read_hostfile(file)
    require_reach(file, nodes, port)
    return nodes


def _software() -> list[str]:
    found = [f"software   {', '.join(f'{name} {found}' for name, found in versions().items())}"]
    there = [f"{name} {version(name)}" for name in EXTRAS if version(name)]
    found += [f"optional   {', '.join(there)}"] if there else []
    return found + [f"missing    {name}, {why}" for name, why in EXTRAS.items() if not version(name)]


def _operators() -> list[str]:
    """The compiler, and DeepSpeed's parts that it makes; they are built here if they are not yet."""
    if not shutil.which("g++"):
        return [f"missing    {COMPILER}"]
    said = subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    found = [f"compiler   g++ {said}"]
    for name, builder, why in (("CPU Adam", CPUAdamBuilder(), COMPILER), ("async_io", AsyncIOBuilder(), AIO)):
        if not builder.is_compatible(verbose=False):
            found.append(f"missing    {name}: {why}")
            continue
        try:
            builder.load(verbose=False)
            found.append(f"built      {name}")
        except (RuntimeError, OSError, ImportError) as error:
            found.append(f"missing    {name} does not build: {str(error).strip().splitlines()[-1]}")
    return found


def _memory() -> list[str]:
    machine = this_machine(Path())
    gpus = f"{machine.device_free / GIB:.1f} GiB free of GPU" if machine.device_free else "no GPU: ranks run on the CPU"
    return [f"memory     {memory_line(distributed.rank())}",
            f"a node     {gpus}, {machine.host_free / GIB:.1f} GiB of CPU memory free, {machine.disk_free / GIB:.1f} GiB of disk",
            f"ranks      {machine.ranks}, at most {machine.ranks_on_node} a node"]  # fmt: skip


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
    """As the planner takes them: give them to `plan` with --rates."""
    on_gpu = distributed.device().type == "cuda"
    base = rates.usual(torch.cuda.get_device_properties(0).total_memory if on_gpu else None)
    found = rates.measured(base, Path(), torch.bfloat16 if on_gpu else torch.float32)
    said = [f"{found.tflops:.2f} x 10^12 operations/s", f"CPU memory {found.memory:.1f} GB/s", f"disk {found.disk:.1f} GB/s"]
    said += [f"PCIe {found.pcie:.1f} GB/s"] if on_gpu else []
    found_between = rates.between_ranks()
    said += [f"between ranks {found_between:.2f} GB/s"] if found_between else ["between ranks: start it with a launcher"]
    return [f"rates      {', '.join(said)}"]
