"""On what a run runs: its nodes, their GPUs or CPUs, and the versions of what computes; no variable of the environment."""

import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from wandistiller import __version__, distributed, launchers
from wandistiller.usage import GIB

PACKAGES = ("torch", "deepspeed", "diffusers", "transformers", "safetensors", "huggingface_hub", "numpy", "pillow")


def version(package: str) -> str:
    """As installed; empty if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def versions() -> dict[str, str]:
    """Of Python, the packages that matter, and the CUDA that torch was built for, if any."""
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}, **cuda}


def cpu_model(root: Path = Path("/")) -> str:
    """The name of the CPU, or where the system does not say it (Arm) its architecture.

    Args:
        root: the folder of proc/.
    """
    info = root / "proc/cpuinfo"
    lines = (line.partition(":") for line in info.read_text().splitlines()) if info.is_file() else ()
    return next((value.strip() for key, _, value in lines if key.strip() == "model name"), platform.machine())


def described() -> dict[str, Any]:
    """The launcher, the versions of rank 0, and each node with its ranks, for OUTPUT/resolved/machine.json. Collective."""
    device, node = distributed.device(), distributed.node_peers()[0]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    mine = {"host": platform.node(), "cpu": cpu_model(), "cores": os.cpu_count(), "memory_gib": round(memory / GIB, 1)}
    ranks = distributed.gather_objects((node, gpu, mine))
    nodes = [about | {"ranks": sum(first == node for node, _, _ in ranks),
                      "gpus": [gpu for node, gpu, _ in ranks if node == first and gpu]}
             for first, _, about in (ranks[first] for first in sorted({node for node, _, _ in ranks}))]  # fmt: skip
    return {"launcher": launchers.started_by(os.environ), "versions": {"wandistiller": __version__} | versions(), "nodes": nodes}


def rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    """What `described` found, in words: each node by its host, then what all have."""
    found = []
    for node in said["nodes"]:
        gpus = "".join(f"{count} x {name}, " for name, count in Counter(node["gpus"]).items())
        found.append((node["host"], f"{node['ranks']} rank(s), {gpus}{node['cpu']}, {node['cores']} cores, "
                      f"{node['memory_gib']} GiB of CPU memory"))  # fmt: skip
    return [*found, ("launcher", said["launcher"]), ("versions", ", ".join(f"{k} {v}" for k, v in said["versions"].items()))]
