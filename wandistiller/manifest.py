"""Folders that appear whole: written aside, flushed, read back, renamed; later it can be told whether they still are whole."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wandistiller.files import atomic, write_json
from wandistiller.problems import StorageError
from wandistiller.stream import Stamp, flush, stamp_of

MANIFEST = "manifest.json"
STEP = "step_"
POLL_SECONDS = 0.05
SMALL_BYTES = 2**20
"""A file up to here is always read: all JSON is, which says what a checkpoint is."""


def part_file(folder: Path, rank: int) -> Path:
    """Where a rank says what it wrote into a folder that is not yet whole, or why it could not."""
    return folder / f".part_{rank}.json"


def finish_part(folder: Path, rank: int, written: dict[str, Stamp]) -> None:
    """Flush a rank's files, read them back, and write its part of the manifest.

    Args:
        written: paths within `folder` -> what they must be.
    """
    said: dict[str, Any] = {}
    try:
        for name, stamp in written.items():
            flush(folder / name)
            if (found := stamp_of(folder / name)) != stamp:
                raise OSError(f"{folder / name} was read back as {found}, not as {stamp}. Do not trust this disk.")
        said = {"files": written}
    except OSError as error:
        said = {"failed": str(error)}
    write_json(part_file(folder, rank), said)


def publish(folder: Path, target: Path, ranks: int, stopped: Callable[[], bool]) -> None:
    """Wait for every rank's part, then let `folder` appear as `target`.

    Raises:
        StorageError: a rank could not write; `folder` is gone.
    """
    files: dict[str, Stamp] = {}
    for rank in range(ranks):
        while not part_file(folder, rank).is_file():
            if stopped():
                return
            time.sleep(POLL_SECONDS)
        said = json.loads(part_file(folder, rank).read_text())
        if "failed" in said:
            shutil.rmtree(folder, ignore_errors=True)
            raise StorageError(f"{target}: could not be saved: {said['failed']}")
        files |= said["files"]
        part_file(folder, rank).unlink()
    write_json(folder / MANIFEST, {"files": {name: Stamp(*stamp)._asdict() for name, stamp in sorted(files.items())}})
    for inner in {folder, *(p.parent for p in folder.rglob("*"))}:
        flush(inner)
    os.replace(folder, target)
    flush(target.parent)


def faults(folder: Path, *, share: tuple[int, int] | None = None) -> list[str]:
    """What is wrong with a published folder: files that are missing or cut off, small ones and, with `share`, any changed.

    Args:
        share: (i, n): also read every n-th large file from the i-th on.
    """
    try:
        files = {k: Stamp(**v) for k, v in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items()}
    except FileNotFoundError:
        return [f"it has no {MANIFEST}"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"its {MANIFEST} cannot be read: {error}"]
    found = []
    for i, (name, stamp) in enumerate(files.items()):
        try:
            if (size := (folder / name).stat().st_size) != stamp.bytes:
                found.append(f"{name} has {size} bytes of {stamp.bytes}")
            elif (size <= SMALL_BYTES or share and i % share[1] == share[0]) and stamp_of(folder / name) != stamp:
                found.append(f"{name} is not as it was written (another checksum)")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    extra = {str(file.relative_to(folder)) for file in folder.rglob("*.safetensors")} - files.keys()
    return found + [f"{name} is none of its files" for name in sorted(extra)]


def steps(checkpoints: Path) -> list[Path]:
    """The published folders, the newest first."""
    named = (p for p in checkpoints.glob(f"{STEP}*") if p.name.removeprefix(STEP).isdigit())
    return sorted(named, key=number, reverse=True)


def number(folder: Path) -> int:
    """The finished steps that a folder's name says."""
    return int(folder.name.removeprefix(STEP))


def settle(newest: Path, keep: int) -> None:
    """Let `latest` name a folder that is known to be whole, and delete all but `keep` counted from it back."""
    with atomic(newest.parent / "latest") as latest:
        latest.write_text(newest.name + "\n")
    for old in [folder for folder in steps(newest.parent) if number(folder) <= number(newest)][keep:]:
        shutil.rmtree(old.rename(_aside(old)), ignore_errors=True)  # never half a folder under its name


def set_aside_newer(checkpoints: Path, step: int) -> list[Path]:
    """Rename what a run that goes on from `step` leaves behind, so that it is not taken for the newest; returns the new names."""
    moved = []
    for folder in steps(checkpoints):
        if number(folder) > step:
            tries = (checkpoints / f"aside_{folder.name}{'.' * bool(n)}{n or ''}" for n in range(1000))
            moved.append(folder.rename(next(t for t in tries if not t.exists())))
    return moved


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def sweep(checkpoints: Path) -> None:
    """Delete what a run that was killed while saving left."""
    for half in checkpoints.glob(f".{STEP}*.tmp"):
        shutil.rmtree(half, ignore_errors=True)
