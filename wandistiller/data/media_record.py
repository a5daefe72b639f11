"""Record of a run's media as it used them first, so that a resume notices which were replaced."""

import os
from collections.abc import Iterable
from pathlib import Path

from wandistiller.distributed import collectives
from wandistiller.distributed.round_robin import own_batches
from wandistiller.utils.files import file_digest, file_fingerprint, read_json, write_json

RECORD = "media.json"
"""File in a run's folder: of each of its media, by the path in the data, fingerprint and digest."""
ENDS = 2**16
"""Bytes of a file's head, and of its tail, that its digest is of."""


def record_media(file: Path, data_path: str, media: Iterable[Path]) -> None:
    """Write the record of a run's media; those with the recorded fingerprint are not read. Collective."""
    known = collectives.broadcast_object(_read(file) if collectives.rank() == 0 else {})
    names = {os.path.relpath(path, _root(data_path)): path for path in media}
    own = {name: _entry(names[name], known.get(name)) for name in own_batches(sorted(names))}
    entries = {name: entry for part in collectives.gather_objects(own) for name, entry in part.items()}
    if collectives.rank() == 0:
        write_json(file, {name: entry for name, entry in entries.items() if entry})


def replaced_media(file: Path, data_path: str) -> list[str]:
    """Return the recorded media, by path in the data, that are there with other content."""
    now = {name: (known, _entry(_root(data_path) / name, known)) for name, known in _read(file).items()}
    return [name for name, (known, entry) in now.items() if entry and entry.split()[1] != known.split()[1]]


def _root(data_path: str) -> Path:
    path = Path(data_path)
    return path if path.is_dir() else path.parent


def _read(file: Path) -> dict[str, str]:
    return read_json(file) if file.is_file() else {}


def _entry(path: Path, known: str | None) -> str | None:
    """Return what identifies a medium, which is `known` while it is as it was; None if it is away."""
    stamp = file_fingerprint(path)  # path, size and time
    if known and known.startswith(stamp):
        return known
    try:
        return f"{stamp} {file_digest(path, ENDS)}"
    except OSError:
        return None
