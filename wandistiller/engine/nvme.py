"""A folder for swapped weights for each process and engine, removed when the process ends."""

import atexit
import fcntl
import os
import resource
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.utils.files import take_lock

PREFIX = "wandistiller_"
IN_USE = "in_use"
IPC_LOCK = 14
"""The capability to lock any amount of memory. Source: Linux, include/uapi/linux/capability.h."""


def to_own_folder(engine: EngineConfig, numels: Iterable[int], name: str, sharers: int) -> EngineConfig:
    """Move a JSON's NVMe paths into a new folder, and make buffers as large as this rank's largest part.

    Engines that share a path delete each other's files, and smaller buffers stop the run (deepspeed 0.19.8).

    Args:
        numels: numbers in each tensor that will be on disk.
        name: of its own for each engine of the process.
        sharers: ranks among which a tensor is cut.
    """
    zero = dict(engine.section("zero_optimization"))
    for target in ("param", "optimizer"):
        section = engine.offload(target)
        if section["device"] == "nvme":
            section["nvme_path"] = str(own_folder(Path(section["nvme_path"])) / name)
            if target == "param":
                section["buffer_size"] = max(-(-max(numels) // sharers), section.get("buffer_size", 0))
            zero[f"offload_{target}"] = section
    return engine.replaced(zero_optimization=zero)


_folders: dict[Path, tuple[Path, Any]] = {}
"""Each parent's folder of this process, and the open lock file, which keeps it marked."""


def own_folder(parent: Path) -> Path:
    """Return this process's folder in `parent`, made once; remove those that killed processes left."""
    parent = parent.absolute()
    if parent not in _folders:
        ours = not parent.exists()
        parent.mkdir(parents=True, exist_ok=True)
        for other in parent.glob(f"{PREFIX}*"):
            if not _is_held(other):
                shutil.rmtree(other, ignore_errors=True)
        folder = parent / f"{PREFIX}{socket.gethostname()}_{os.getpid()}"
        folder.mkdir(exist_ok=True)
        _folders[parent] = folder, _hold(folder)
        atexit.register(_remove, folder, ours)
    return _folders[parent][0]


def _remove(folder: Path, and_parent: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if and_parent and not any(folder.parent.iterdir()):
        folder.parent.rmdir()


def _hold(folder: Path) -> Any:
    """Mark a folder as in use until this process ends, however it ends."""
    lock = (folder / f".{IN_USE}").open("w")
    take_lock(lock)  # nobody else has it
    (folder / f".{IN_USE}").rename(folder / IN_USE)  # it is there only once it is locked
    return lock


def _is_held(folder: Path) -> bool:
    try:
        with (folder / IN_USE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, just being made, or not to be known, on a file system without locks
        return True
    return False


def locked_bytes(engine: EngineConfig, numels: Iterable[int], sharers: int) -> int:
    """Bytes of one engine's buffers on a rank, which DeepSpeed keeps from being paged out (0.19.8)."""
    numels, locked = list(numels), 0
    weights, states = engine.offload("param"), engine.offload("optimizer")
    if weights["device"] == "nvme":
        buffer = max(-(-max(numels) // sharers), weights.get("buffer_size", 0))
        locked += engine.dtype.itemsize * weights.get("buffer_count", 5) * buffer
    if states["device"] == "nvme":
        buffer = min(-(-sum(numels) // sharers), engine.zero.sub_group_size)
        locked += 4 * states.get("buffer_count", 4) * buffer
    return locked


def lock_problems(nbytes: int, root: Path = Path("/")) -> list[str]:
    """Problems of locking so many bytes in memory: DeepSpeed would abort without a message (0.19.8).

    Args:
        root: the folder of proc/.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = dict(line.split(":", 1) for line in (root / "proc/self/status").read_text().splitlines())
    if limit == resource.RLIM_INFINITY or nbytes <= limit or int(status["CapEff"], 16) >> IPC_LOCK & 1:
        return []
    return [
        f"What is on NVMe has buffers of {nbytes / 2**20:.0f} MiB a rank that stay in memory, and this user "
        f"may lock {limit / 2**20:.3g} MiB (`ulimit -l`). Raise it: in /etc/security/limits.conf "
        "`* - memlock unlimited`, of a service LimitMEMLOCK=infinity, of a container --ulimit memlock=-1; "
        "or offload to cpu."
    ]
