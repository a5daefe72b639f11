"""Hardware and software of a run: nodes, GPUs or CPUs, versions; no environment variables."""

import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

import torch

from wandistiller import __version__
from wandistiller.distributed import collectives, device, launchers
from wandistiller.utils.system_memory import GIB

PACKAGES = "torch deepspeed diffusers transformers safetensors huggingface_hub numpy pillow".split()


class Environment(TypedDict):
    """The contents of OUTPUT/resolved/machine.json."""

    launcher: str
    versions: dict[str, str]
    nodes: list[dict[str, Any]]
    """Host, cpu, cores, memory_gib, ranks of each, and gpus: names, one for each rank that has one."""


def version(package: str) -> str:
    """Return the installed version of a package; empty if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}, **cuda}


def cpu_model(root: Path = Path("/")) -> str:
    """Return the name of the CPU in `root`/proc, or its architecture where there is no name (Arm)."""
    info = root / "proc/cpuinfo"
    lines = (line.partition(":") for line in info.read_text().splitlines()) if info.is_file() else ()
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.machine())


def collect() -> Environment:
    """Collect launcher, versions on rank 0, and nodes for OUTPUT/resolved/machine.json. Collective."""
    gpu, node = device.name(), collectives.node_peers()[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"host": platform.node(), "cpu": cpu_model(), "cores": os.cpu_count()}
    ranks = collectives.gather_objects((node, gpu, machine | {"memory_gib": round(memory / GIB, 1)}))
    nodes = []
    for first in sorted({node for node, _, _ in ranks}):
        gpus = [gpu for node, gpu, _ in ranks if node == first]
        nodes.append(ranks[first][2] | {"ranks": len(gpus), "gpus": [gpu for gpu in gpus if gpu]})
    launcher = launchers.started_by(os.environ)
    return {"launcher": launcher, "versions": {"wandistiller": __version__} | versions(), "nodes": nodes}


def rows(collected: Environment) -> list[tuple[str, str]]:
    """Format the result of `collect`: each node by its host, then launcher and versions."""
    nodes = []
    for node in collected["nodes"]:
        gpus = "".join(f"{count} x {name}, " for name, count in Counter(node["gpus"]).items())
        cpu = f"{node['cpu']}, {node['cores']} cores, {node['memory_gib']} GiB of CPU memory"
        nodes.append((node["host"], f"{node['ranks']} rank(s), {gpus}{cpu}"))
    versions = ", ".join(f"{name} {version}" for name, version in collected["versions"].items())
    return [*nodes, ("launcher", collected["launcher"]), ("versions", versions)]
