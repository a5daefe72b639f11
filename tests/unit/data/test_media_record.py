"""Media that were replaced under their names since a run began."""

import os
import shutil
from pathlib import Path

import pytest

from wandistiller.data.media import record_media, replaced_media

NAMES = ("a.png", "in/b.png", "c.mp4")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The record of three files in `data`."""
    for number, name in enumerate(NAMES):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(bytes([number]) * 200_000)
    files = [tmp_path / "data" / name for name in NAMES]
    record_media(tmp_path / "media.json", str(tmp_path / "data"), files)
    return tmp_path / "media.json"


@pytest.mark.usefixtures("one_rank")
def test_what_has_other_content_is_replaced_and_what_was_touched_moved_or_is_away_is_not(
    tmp_path: Path, record: Path
) -> None:
    data = tmp_path / "data"
    assert replaced_media(record, str(data)) == []
    os.utime(data / "a.png", (1, 1))
    (data / "c.mp4").unlink()
    (data / "in/b.png").write_bytes(b"\1" * 199_999 + b"x")  # of the same size
    moved = shutil.move(data, tmp_path / "elsewhere")
    assert replaced_media(record, str(moved)) == ["in/b.png"]


@pytest.mark.usefixtures("one_rank")
def test_a_new_record_has_the_media_as_they_are_now(tmp_path: Path, record: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "data" / "a.png"
    file.write_bytes(b"other")
    assert replaced_media(record, str(data)) == ["a.png"]
    record_media(record, str(data), [file])
    assert replaced_media(record, str(data)) == []


@pytest.mark.usefixtures("one_rank")
def test_media_of_a_known_size_and_time_are_not_read_again(tmp_path: Path, record: Path) -> None:
    before = record.read_text()
    file = tmp_path / "data" / "a.png"
    status = file.stat()
    file.write_bytes(b"x" * status.st_size)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    record_media(record, str(tmp_path / "data"), [tmp_path / "data" / name for name in NAMES])
    assert record.read_text() == before
