"""What a run's media were as it used them first, so that a resume notices which were replaced."""

import os
from collections.abc import Iterable
from pathlib import Path

from wandistiller.distributed import collectives
from wandistiller.distributed.round_robin import own_batches
from wandistiller.utils.files import file_record, read_json, write_json

RECORD = "media.json"
"""File in a run's folder: of each of its media, by the path in the data, its `file_record`."""


def record_media(file: Path, data_path: str, media: Iterable[Path]) -> None:
    """Write the record of a run's media; those of a size and time as recorded are not read. Collective."""
    known = collectives.broadcast_object(_read(file) if collectives.rank() == 0 else {})
    names = {os.path.relpath(path, _root(data_path)): path for path in media}
    own = {name: file_record(names[name], known.get(name)) for name in own_batches(sorted(names))}
    entries = {name: entry for part in collectives.gather_objects(own) for name, entry in part.items()}
    if collectives.rank() == 0:
        write_json(file, {name: entry for name, entry in entries.items() if entry})


def replaced_media(file: Path, data_path: str) -> list[str]:
    """Return the recorded media, by path in the data, that are there with other content."""
    now = {name: (known, file_record(_root(data_path) / name, known)) for name, known in _read(file).items()}
    return [name for name, (known, entry) in now.items() if entry and entry.split()[2] != known.split()[2]]


def _root(data_path: str) -> Path:
    path = Path(data_path)
    return path if path.is_dir() else path.parent


def _read(file: Path) -> dict[str, str]:
    return read_json(file) if file.is_file() else {}
