"""Checks of engines that keep weights or optimizer state on NVMe, on the machine of the run."""

from typing import Any

import torch

from wandistiller.engine import ds_config
from wandistiller.engine.nvme import lock_problems, locked_bytes
from wandistiller.utils.errors import folder_problems
from wandistiller.wan.transformer import numels


def nvme_problems(parts: dict[str, Any], world: int) -> list[str]:
    """List folders that cannot be written to, and more locked memory than this user may have.

    Args:
        parts: fields of Job, but for those that are wrong.
    """
    engines = _engines(parts)
    swaps = (ds_config.offload_section(ds, target) for ds, _ in engines for target in ("param", "optimizer"))
    folders = dict.fromkeys(swap.get("nvme_path") for swap in swaps if swap["device"] == "nvme")
    problems = [p for folder in folders if folder for p in folder_problems("nvme_path", folder)]
    locked = 0
    for ds, config in engines:
        itemsize = getattr(torch, ds_config.dtype_name(ds)).itemsize
        locked += locked_bytes(ds, numels(config).values(), world, itemsize) if config else 0
    return problems + lock_problems(locked)


def _engines(parts: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return each engine's JSON with the config of its network, which is None if it is wrong."""
    teacher = parts["folder"].config if "folder" in parts else None
    student = parts.get("student_transformer")
    engines = [(parts.get("teacher_ds"), teacher), (parts.get("student_ds"), student)]
    for role in parts["objective"].others.values() if "objective" in parts else ():
        ds = parts.get("others_ds") or parts.get("student_ds")
        engines.append((ds, role.origin(student, teacher)))
    return [(ds, config) for ds, config in engines if ds]
