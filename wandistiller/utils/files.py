"""Atomic writes, locks, fingerprints of folders, and JSON files."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from wandistiller.utils.errors import DEEP, ConfigError, impossible_values, problem, readable
from wandistiller.utils.logging import heartbeat, log

PARTIAL = (".part", ".crdownload", ".aria2", ".incomplete", ".partial", ".download", ".tmp")
"""Endings of files that are still being written."""
FACTS = "wandistiller.json"
"""File in an export with the facts of its run."""
ENDS = 1 << 20
"""Bytes of a file's head, and of its tail, by which its content is known."""
RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def system_error(error: BaseException, path: Path | None = None) -> OSError | None:
    """Return the system's error behind `error`, also where safetensors 0.8 wraps it in its own; else None.

    Args:
        path: the file concerned, for an error without a name.
    """
    if isinstance(error, OSError):
        if "CUDA_HOME" in str(error):  # torch 2.13, which finds no compiler
            return None
        if path and error.errno and not error.filename:  # without errno, only the text would be lost
            error.filename = str(path)
        return error
    if match := RUST_ERROR.search(str(error)):
        return OSError(int(match[1]), os.strerror(int(match[1])), path and str(path))
    return None


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path`; rename it to `path` when the block ends without an error.

    It is on the disk then: what is written afterwards does not outlive it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{_this_machine()}.{os.getpid()}.tmp")
    try:
        yield temporary
        open_as_umask_says(temporary)
        flush_all(temporary)
        os.replace(temporary, path)
        flush(path.parent)
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
    """Make a folder in `folder` and delete it when the block ends; after a kill, `delete_leftovers` does."""
    temporary = folder / f".scratch.{_this_machine()}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def delete_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete temporary files in `folder` of this machine's dead processes; other machines may share it.

    Args:
        name: of the file that they were for; None: all, in folders in it too.
    """
    for half in folder.rglob(".*.tmp") if name is None else folder.glob(f".{glob.escape(name)}.*.tmp"):
        *_, machine, pid, _ = ("", "", *half.name.split("."))
        if machine == _this_machine() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(half) if half.is_dir() else half.unlink(missing_ok=True)


def umask() -> int:
    """The bits that no new file gets; `os.umask` could read them only by changing them."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^Umask:\s*(\d+)", status, re.MULTILINE)[1], 8)


def open_as_umask_says(path: Path) -> None:
    """Give a new file, or all in a new folder, the umask's mode; safetensors 0.8 makes its files 0600.

    Hard links stay as they are: their mode is that of another's file.
    """
    closed = umask()
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_dir():  # shutil.copytree gives it the mode of the one it copies
            file.chmod(0o777 & ~closed)
        elif file.is_file() and file.stat().st_nlink == 1:
            file.chmod(0o666 & ~closed)


def _this_machine() -> str:
    return digest(platform.node())[:8]


def lock(folder: Path) -> IO[str]:
    """Lock a folder until the file is closed or the process ends; raises ConfigError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+")
    if take_lock(file) is False:
        file.seek(0)
        raise ConfigError(
            f"{folder}: another run is writing there ({file.read().strip()}). Wait for it, stop it (touch "
            f"{folder / 'STOP'}), or give another --output_dir. If that process is gone with its node, "
            f"remove {folder / '.lock'}."
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    return file


_refusals: set[int | None] = set()
"""Errors of file systems without locks of which a line was logged."""


def take_lock(file: IO[Any]) -> bool | None:
    """Lock an open file without waiting; return False if another process holds the lock.

    None: the file system has no locks, as Lustre without `flock` or NFSv3 without lockd; one line says so.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):  # another process has it: flock(2), fcntl(2)
            return False
        if error.errno not in _refusals:
            _refusals.add(error.errno)
            text = "locks     %s cannot be locked (%s): nothing stops a second process from using its folder"
            log.warning(text, file.name, error.strerror)
        return None
    return True


WAIT = 1.0
"""Seconds between looks at a lock of another process."""


def wait_for_lock(file: IO[Any], line: str) -> bool | None:
    """Lock an open file, and log a line if another process has it first; None as `take_lock`."""
    is_told = False
    while (is_locked := take_lock(file)) is False:
        if not is_told:
            log.info(line)
        is_told = True
        heartbeat()
        time.sleep(WAIT)
    return is_locked


def write_json(path: Path, value: Any) -> None:
    with atomic(path) as temporary:
        temporary.write_text(as_json(value), encoding="utf-8")


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def digest(*parts: object) -> str:
    """Hash `parts`, any JSON values, to 16 hex digits."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def fingerprint(folders: Iterable[Path]) -> str:
    """Hash the files in `folders` by name, size, first and last MiB, without reading tens of GB."""
    return digest(ends_of_files(folders))


def ends_of_files(folders: Iterable[Path]) -> list[tuple[str, int, str]]:
    """List the files in `folders`: FOLDER/NAME, size, and the hash of their first and last MiB."""
    parts = []
    for folder in folders:
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            parts.append((f"{folder.name}/{file.relative_to(folder)}", *_ends(file)))
    return parts


def file_digest(file: Path) -> str:
    """Hash a file's size, head and tail."""
    return digest(_ends(file))


def _ends(file: Path) -> tuple[int, str]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(ENDS)
        stream.seek(max(0, size - ENDS))
        return size, hashlib.blake2b(head + stream.read(), digest_size=8).hexdigest()


def file_fingerprint(path: Path) -> str:
    """Fingerprint a file by path, size and modification time; another one if it changed or is missing."""
    try:
        status = path.stat()
    except OSError:
        return digest(str(path), None)
    return digest(str(path), status.st_size, status.st_mtime_ns)


def content_fingerprint(path: Path) -> str:
    """Fingerprint a file by name and content, wherever it lies; if it cannot be read, as the one above."""
    try:
        with path.open("rb") as stream:
            return digest(path.name, hashlib.file_digest(stream, "blake2b").hexdigest())
    except OSError:
        return file_fingerprint(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Copy a folder; within a file system by hard links, which take no space and survive a move.

    A file that fewer may read than the umask says is copied, because a link has the same mode. Of a symbolic
    link what it leads to is taken; one that leads nowhere is left out.
    """
    readable_by = 0o444 & ~umask()

    def place(src: str, dst: str) -> None:
        try:
            if os.stat(src).st_mode & readable_by != readable_by:
                raise PermissionError(src)
            os.link(os.path.realpath(src), dst)
        except OSError:  # another file system, or one without links
            shutil.copyfile(src, dst)

    def leading_nowhere(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not os.path.exists(os.path.join(folder, name))]

    # ignore_dangling_symlinks of Python 3.11 looks for a relative link's file in the current folder
    shutil.copytree(source, target, copy_function=place, ignore=leading_nowhere)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(path: Path) -> None:
    """Flush a file, or a folder with all that is in it, to the disk."""
    for file in filter(Path.exists, [path, *path.rglob("*")]):  # no link that leads nowhere
        flush(file)


PACKAGE = Path(__file__).parent.parent
SHIPPED = next(p for p in (PACKAGE / "ds_configs", PACKAGE.parent / "ds_configs") if p.is_dir())
_PIPELINES = {"tiny": "pipeline", "tiny-video": "video_pipeline", "tiny-i2v": "image_pipeline"}
TINY = {name: PACKAGE / "tiny" / folder for name, folder in _PIPELINES.items()}
"""The embedded pipelines by their names."""


def shipped(path: str) -> Path:
    """Return `path`, or where there is no such `ds_configs/...`, the file of the package."""
    here = Path(path)
    if not here.exists() and here.parts[:1] == ("ds_configs",):
        return SHIPPED.joinpath(*here.parts[1:])
    return here


def in_its_place(raw: bytes) -> str | None:
    """Say what a download may leave in place of a file, from its first bytes; None: nothing that is known."""
    if raw.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file that it stands for"
    if raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:9].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, as of a sign-in, an error, or a hub's /blob/ address in place of /resolve/"
    return None


PATH_ENDS = ("_path", "_dir", "_config")
"""Endings of the names of settings whose text is a path."""
OTHER_PATHS = ("checkpoint", "init", "model", "output", "recipe", "recommend", "resume", "student")


def at_home(value: Any, key: str = "") -> Any:
    """Return settings with the home folder in place of a `~` that a path begins with, as a shell does."""
    if isinstance(value, dict):
        return {name: at_home(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [at_home(inner) if isinstance(inner, dict) else inner for inner in value]
    is_path = isinstance(value, str | Path) and (key.endswith(PATH_ENDS) or key in OTHER_PATHS)
    return type(value)(os.path.expanduser(value)) if is_path and str(value).startswith("~") else value


def read_json(path: str | Path) -> dict[str, Any]:
    """Read one JSON object. Integers of 19 digits and more become floats, `~` of paths the home folder.

    Raises:
        ConfigError: the file cannot be read, is not JSON, is not an object, or holds what no setting can be.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]:
            raise ConfigError(f"{path}: `{min(twice)}` is given twice. Keep one.")
        return dict(pairs)

    with readable(path):
        file = shipped(str(path))
        # a pipe would be read by one rank, and keep it waiting
        if file.stat() and not (file.is_file() or file.is_dir()):
            raise ConfigError(f"{path}: is not a regular file, which every rank can read. Name one.")
        raw = file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
        value = json.loads(
            text, object_pairs_hook=unique, parse_int=lambda n: int(n) if len(n) < 100 else float(n)
        )
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}. Save it as UTF-8.") from None
    except json.JSONDecodeError as error:
        if what := in_its_place(raw):
            raise ConfigError(f"{path}: it is {what}. Fetch this file again.") from None
        remedy = "Fix that place; JSON has double quotes, no comments, and no comma after the last value."
        if not text.strip():
            remedy = "The file is empty; write one JSON object, {...}."
        raise ConfigError(f"{path}: not valid JSON: {error}. {remedy}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {DEEP}") from None
    if not isinstance(value, dict):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{path}: holds {kind}. Write one JSON object, {{...}}.")
    if problems := impossible_values(path, value):
        raise ConfigError(*problems)
    return at_home(value)


REFUSED = {
    "auto_map": "No code of a folder or hub id is ever run. Give an original pipeline, or delete this key.",
    "quantization_config": "Give the weights without quantization.",
}
"""Keys of a config.json that ask for code of its folder, or for another library, and what to do."""


def refused_keys(where: str | Path, config: dict[str, Any]) -> list[str]:
    """List the keys that ask for code of the folder, or for another library."""
    return [problem(where, key, config[key], why) for key, why in REFUSED.items() if config.get(key)]
