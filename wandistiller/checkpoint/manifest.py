"""Folders that appear whole: written aside, flushed, read back, renamed; later they can be verified."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wandistiller.checkpoint.safetensors_stream import FileChecksum, checksum
from wandistiller.experts import Expert
from wandistiller.utils.errors import StorageError
from wandistiller.utils.files import atomic, flush, write_json

MANIFEST = "manifest.json"
STEP = "step_"
POLL_SECONDS = 0.05
SMALL_BYTES = 2**20
"""Size up to which a file is always verified; every JSON file is smaller."""


def part_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's part of the manifest, or of the reason why it could not write its files."""
    return folder / f".part_{rank}.json"


def finish_part(folder: Path, rank: int, written: dict[str, FileChecksum]) -> None:
    """Flush a rank's files, by path in `folder`, read them back, and write its part of the manifest."""
    part: dict[str, Any] = {"files": written}
    try:
        for name, expected in written.items():
            flush(folder / name)
            if (actual := checksum(folder / name)) != expected:
                message = f"was read back as {actual}, not as {expected}. Do not trust this disk."
                raise OSError(f"{folder / name} {message}")
    except OSError as error:
        part = {"failed": str(error)}
    write_json(part_file(folder, rank), part)


def commit(folder: Path, target: Path, ranks: int, stopped: Callable[[], bool]) -> None:
    """Wait for every rank's part, then rename `folder` to `target`.

    Raises:
        StorageError: a rank could not write; `folder` is deleted.
    """
    files: dict[str, FileChecksum] = {}
    for rank in range(ranks):
        # by the folder, which is opened: a client of NFS remembers that a name was not there
        while part_file(folder, rank).name not in os.listdir(folder):
            if stopped():
                return
            time.sleep(POLL_SECONDS)
        part = json.loads(part_file(folder, rank).read_text())
        if "failed" in part:
            shutil.rmtree(folder, ignore_errors=True)
            raise StorageError(f"{target}: could not be saved: {part['failed']}")
        files |= part["files"]
        part_file(folder, rank).unlink()
    checksums = {name: FileChecksum(*entry)._asdict() for name, entry in sorted(files.items())}
    write_json(folder / MANIFEST, {"files": checksums})
    for inner in {folder, *(p.parent for p in folder.rglob("*"))}:
        flush(inner)
    os.replace(folder, target)
    flush(target.parent)


def verify(folder: Path, *, share: tuple[int, int] | None = None, of_student: bool = False) -> list[str]:
    """List the problems of a committed folder: missing and cut-off files, and wrong checksums of small ones.

    Args:
        share: (i, n): check also every n-th large file from the i-th on.
        of_student: leave out large files of networks that were trained beside the student.
    """
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        files = {name: FileChecksum(**entry) for name, entry in listed.items()}
    except FileNotFoundError:
        return [f"it has no {MANIFEST}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    problems = []
    for i, (name, expected) in enumerate(files.items()):
        try:
            size = (folder / name).stat().st_size
            # ROLE/EXPERT/, where EXPERT/ is the student's
            of_another = name.split("/")[1:2] in ([expert.value] for expert in Expert)
            is_read = share and i % share[1] == share[0] and not (of_student and of_another)
            is_read = is_read or size <= SMALL_BYTES
            if size != expected.bytes:
                problems.append(f"{name} has {size} bytes of {expected.bytes}")
            elif is_read and checksum(folder / name) != expected:
                problems.append(f"{name} is not as it was written (another checksum)")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    extra = {str(file.relative_to(folder)) for file in folder.rglob("*.safetensors")} - files.keys()
    return problems + [f"{name} is none of its files" for name in sorted(extra)]


def steps(checkpoints: Path) -> list[Path]:
    """List the committed folders, the newest first."""
    named = (p for p in checkpoints.glob(f"{STEP}*") if re.fullmatch(rf"{STEP}\d+", p.name))
    return sorted(named, key=_step, reverse=True)


def folder_name(step: int) -> str:
    return f"{STEP}{step:08d}"


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix(STEP))


def rotate(newest: Path, keep: int) -> None:
    """Write the name of a verified folder to `latest`; delete all but `keep` folders up to it."""
    with atomic(newest.parent / "latest") as latest:
        latest.write_text(newest.name + "\n")
    for old in [folder for folder in steps(newest.parent) if _step(folder) <= _step(newest)][keep:]:
        # never half a folder under its name
        shutil.rmtree(old.rename(temporary_name(old)), ignore_errors=True)


def set_aside_newer(checkpoints: Path, step: int) -> list[Path]:
    """Rename the checkpoints after that of `step`, from which the run resumes; return the names."""
    moved = []
    for folder in steps(checkpoints):
        if _step(folder) > step:
            tries = (checkpoints / f"aside_{folder.name}{'.' * bool(n)}{n or ''}" for n in range(1000))
            moved.append(folder.rename(next(t for t in tries if not t.exists())))
    return moved


def temporary_name(folder: Path) -> Path:
    """Return the name of a checkpoint's folder while it is written or deleted."""
    return folder.with_name(f".{folder.name}.tmp")


def remove_temporaries(checkpoints: Path) -> None:
    """Delete the unfinished folders of a run that was killed while saving."""
    for half in checkpoints.glob(f".{STEP}*.tmp"):
        shutil.rmtree(half, ignore_errors=True)
