"""Files appear whole or not at all; folders are recognised by a fingerprint."""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from wandistiller.problems import ConfigError

SAID_IN_RUST = re.compile(r"\(os error (\d+)\)")


def system_error(error: BaseException, path: Path | None = None) -> OSError | None:
    """What the system refused, also where a library says so in an error of its own (safetensors 0.8); None if it is no such.

    Args:
        path: the file that it was about, for an error that does not say.
    """
    if isinstance(error, OSError):
        if "CUDA_HOME" in str(error):  # torch 2.13, which finds no compiler
            return None
        if path and error.errno and not error.filename:  # one that is words alone would lose them
            error.filename = str(path)
        return error
    if found := SAID_IN_RUST.search(str(error)):
        return OSError(int(found[1]), os.strerror(int(found[1])), path and str(path))
    return None


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it to `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{_this_machine()}.{os.getpid()}.tmp")
    try:
        yield temporary
        if temporary.is_file():
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        if refused := system_error(error, path):
            raise refused from None
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder inside `folder` that is gone when the block ends; what a killed process leaves is for `sweep`."""
    made = folder / f".scratch.{_this_machine()}.{os.getpid()}.tmp"
    made.mkdir(parents=True, exist_ok=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete what processes of this machine that are gone left half-written anywhere in `folder`; others may share it."""
    for half in folder.rglob(".*.tmp"):
        *_, machine, pid, _ = ("", "", *half.name.split("."))
        if machine == _this_machine() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(half) if half.is_dir() else half.unlink(missing_ok=True)


def _this_machine() -> str:
    return digest(platform.node())[:8]


def lock(folder: Path) -> IO[str]:
    """Have `folder` to oneself while the result lives; the system lets go of it when the process ends, however.

    Raises:
        ConfigError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        raise ConfigError(f"{folder}: another run is writing there ({file.read().strip()}). Wait for it, stop it (touch "
                          f"{folder / 'STOP'}), or give another --output_dir.") from None  # fmt: skip
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def digest(*parts: object) -> str:
    """16 hex digits that stand for `parts` (anything JSON can write)."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def fingerprint(folders: Iterable[Path]) -> str:
    """Stand for the files in `folders` without reading tens of GB: names, sizes, first and last MiB of each."""
    parts = []
    for folder in folders:
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            size = file.stat().st_size
            with file.open("rb") as stream:
                head = stream.read(1 << 20)
                stream.seek(max(0, size - (1 << 20)))
                ends = hashlib.blake2b(head + stream.read(), digest_size=8).hexdigest()
            parts.append((f"{folder.name}/{file.relative_to(folder)}", size, ends))
    return digest(parts)


def link_or_copy(source: Path, target: Path) -> None:
    """Copy a folder; on one file system by hard links, which take no space and survive a move of either folder."""

    def place(src: str, dst: str) -> None:
        try:
            os.link(os.path.realpath(src), dst)
        except OSError:  # another file system, or one without links
            shutil.copy2(src, dst)

    shutil.copytree(source, target, copy_function=place)
