"""Files that appear whole or not at all, and fingerprints."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from wandistiller.utils import files
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import atomic, digest, fingerprint, link_or_copy, lock, system_error, take_lock


def folder_with(path: Path, **files: bytes) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_a_file_appears_under_its_own_name_only_after_the_block(tmp_path: Path) -> None:
    target = tmp_path / "new" / "a.txt"
    with atomic(target) as temporary:
        temporary.write_text("x")
        assert not target.exists()
    assert target.read_text() == "x" and os.listdir(target.parent) == ["a.txt"]


def test_an_error_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_a_folder_appears_whole_or_after_an_error_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic(tmp_path / "a") as temporary:
        folder_with(temporary, x=b"1")
        raise RuntimeError
    assert os.listdir(tmp_path) == []
    with atomic(tmp_path / "a") as temporary:
        folder_with(temporary, x=b"1")
    assert (tmp_path / "a" / "x").read_bytes() == b"1" and os.listdir(tmp_path) == ["a"]


def test_a_digest_depends_on_parts_and_types_but_not_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len({digest("ab"), digest("a", "b"), digest(["a", "b"]), digest("1"), digest(1)}) == 5


def test_a_fingerprint_depends_on_neither_place_nor_time(tmp_path: Path) -> None:
    one, two = (folder_with(tmp_path / place / "vae", a=b"123", b=b"") for place in "xy")
    os.utime(two / "a", (0, 0))
    assert fingerprint([one]) == fingerprint([two])


@pytest.mark.parametrize("files", [{"a": b"124"}, {"a": b"1234"}, {"b": b"123"}, {"a": b"123", "b": b""}])
def test_a_fingerprint_changes_with_content_size_name_and_number_of_files(
    tmp_path: Path, files: dict
) -> None:
    one, two = folder_with(tmp_path / "x" / "vae", a=b"123"), folder_with(tmp_path / "y" / "vae", **files)
    assert fingerprint([one]) != fingerprint([two])


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_a_fingerprint_depends_on_both_ends_of_a_large_file(tmp_path: Path, place: int) -> None:
    content = bytearray(3 << 20)
    one = folder_with(tmp_path / "x" / "vae", a=bytes(content))
    content[place] = 1
    assert fingerprint([one]) != fingerprint([folder_with(tmp_path / "y" / "vae", a=bytes(content))])


def test_copied_files_and_links_outlive_the_source(tmp_path: Path) -> None:
    folder_with(tmp_path / "blobs", b=b"123")  # as the hub's cache lays files out
    source = folder_with(tmp_path / "source", a=b"456")
    (source / "link").symlink_to("../blobs/b")
    link_or_copy(source, tmp_path / "target")
    for file in (source / "a", tmp_path / "blobs" / "b"):
        file.unlink()
    assert [(tmp_path / "target" / name).read_bytes() for name in ("a", "link")] == [b"456", b"123"]


def test_a_missing_compiler_is_no_fault_of_a_disk() -> None:
    text = "CUDA_HOME environment variable is not set. Please set it to your CUDA install root."
    assert system_error(OSError(text)) is None
    assert system_error(OSError("there is no config.json"))  # diffusers' error for a folder that is gone


def without_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Answer as the system does for a file system that has no locks."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(files, "_refusals", set())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_told_once_and_the_run_begins(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_locks(monkeypatch, number)
    for folder in "ab":
        lock(tmp_path / folder).close()
    (line,) = caplog.messages
    assert f"{tmp_path / 'a' / '.lock'} cannot be locked ({os.strerror(number)})" in line
    assert (tmp_path / "b" / ".lock").read_text().startswith(f"process {os.getpid()} on ")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES], ids=errno.errorcode.get)
def test_errors_that_mean_held_are_no_missing_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch, number)
    with (tmp_path / "a").open("w") as file:
        assert take_lock(file) is False


def test_a_locked_folder_is_refused_with_all_that_may_help(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(ConfigError) as refused:
        lock(tmp_path)
    (text,) = refused.value.problems
    assert text.startswith(f"{tmp_path}: another run is writing there (process {os.getpid()} on ")
    assert text.endswith(f"If that process is gone with its node, remove {tmp_path / '.lock'}.")
