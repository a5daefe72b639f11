"""A swap folder of its own for each engine and run, for teachers on NVMe; gone when the run ends."""

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


def to_own_folder(ds: dict[str, Any], reader: WeightReader, dtype: torch.dtype, engine: str) -> dict[str, Any]:
    """`ds` with its NVMe path moved into a new folder and the buffers as large as the largest part. Collective.

    Engines that share a path delete each other's files, and smaller buffers stop the run (deepspeed 0.19.8).
    """
    offload = ds["zero_optimization"]["offload_param"]
    folder = _run_folder(Path(offload["nvme_path"])) / engine
    swapped = [s.shape.numel() for name, s in reader.stored.items() if parameter_dtype(name, dtype) == dtype]
    part = -(-max(swapped) // distributed.world_size())
    own = offload | {"nvme_path": str(folder), "buffer_size": max(part, offload.get("buffer_size", 0))}
    return ds | {"zero_optimization": ds["zero_optimization"] | {"offload_param": own}}


_folders: dict[Path, Path] = {}


def _run_folder(parent: Path) -> Path:
    """This run's folder in `parent`, made at the first call; those that killed runs left are removed. Collective."""
    if parent not in _folders:
        name = distributed.from_rank_0(f"{PREFIX}{socket.gethostname()}_{os.getpid()}")
        folder = _folders[parent] = (parent / name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        _hold(folder)
        distributed.barrier()  # all ranks hold theirs before any looks for abandoned ones
        for other in parent.glob(f"{PREFIX}*"):
            if other.absolute() != folder and not _is_held(other):
                shutil.rmtree(other, ignore_errors=True)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _folders[parent]


def _hold(folder: Path) -> None:
    """Mark a folder as in use until this process ends, however it ends."""
    lock = (folder / "in_use").open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    _locks.append(lock)


_locks: list[Any] = []  # a closed file is an unlocked one


def _is_held(folder: Path) -> bool:
    try:
        with (folder / "in_use").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # just being made
        return True
    except OSError:
        return True
    return False
