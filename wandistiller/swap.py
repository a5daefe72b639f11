"""A folder of its own on disk for each process and engine, for teachers that live there; gone when the process ends."""

import atexit
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import torch

from wandistiller import distributed
from wandistiller.wan import parameter_dtype
from wandistiller.weights import WeightReader

PREFIX = "wandistiller_"
IN_USE = "in_use"


def to_own_folder(ds: dict[str, Any], reader: WeightReader, dtype: torch.dtype, engine: str) -> dict[str, Any]:
    """`ds` with its NVMe path moved into a new folder, and buffers as large as this rank's largest part.

    Engines that share a path delete each other's files, and smaller buffers stop the run (deepspeed 0.19.8).
    """
    offload = ds["zero_optimization"]["offload_param"]
    swapped = [s.shape.numel() for name, s in reader.stored.items() if parameter_dtype(name, dtype) == dtype]
    part = -(-max(swapped) // distributed.world_size())
    own = offload | {
        "nvme_path": str(own_folder(Path(offload["nvme_path"])) / engine),
        "buffer_size": max(part, offload.get("buffer_size", 0)),
    }
    return ds | {"zero_optimization": ds["zero_optimization"] | {"offload_param": own}}


_own: dict[Path, tuple[Path, Any]] = {}  # the open lock file keeps the folder marked


def own_folder(parent: Path) -> Path:
    """This process's folder in `parent`, made at the first call; those that killed processes left are removed."""
    parent = parent.absolute()
    if parent not in _own:
        ours = not parent.exists()
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob(f"{PREFIX}*"):
            if not _is_held(other):
                shutil.rmtree(other, ignore_errors=True)
        folder = parent / f"{PREFIX}{socket.gethostname()}_{os.getpid()}"
        folder.mkdir(exist_ok=True)
        _own[parent] = folder, _hold(folder)
        atexit.register(_remove, folder, ours)
    return _own[parent][0]


def _remove(folder: Path, and_parent: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if and_parent and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _hold(folder: Path) -> Any:
    """Mark a folder as in use until this process ends, however it ends."""
    lock = (folder / f".{IN_USE}").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / f".{IN_USE}").rename(folder / IN_USE)  # it is there only once it is locked
    return lock


def _is_held(folder: Path) -> bool:
    try:
        with (folder / IN_USE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or just being made
        return True
    return False
