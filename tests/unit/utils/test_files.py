"""Files that appear whole or not at all, and fingerprints."""

import json
import os
from pathlib import Path

import pytest

from wandistiller.utils.files import atomic, digest, fingerprint, link_or_copy, system_error, write_json


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


def test_an_error_leaves_no_half_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic(tmp_path / "a") as temporary:
        folder_with(temporary, x=b"1")
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    with atomic(tmp_path / "a") as temporary:
        folder_with(temporary, x=b"1")
    assert (tmp_path / "a" / "x").read_bytes() == b"1" and os.listdir(tmp_path) == ["a"]


def test_json_keeps_chinese_readable_and_comes_back_equal(tmp_path: Path) -> None:
    value = {"prompt": "色调艳丽", "n": [1, 2.5, None]}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "色调艳丽" in text and json.loads(text) == value


def test_a_digest_is_16_hex_digits_whatever_the_key_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len(digest("x")) == 16 and int(digest("x"), 16) >= 0


def test_a_digest_tells_parts_and_types_apart() -> None:
    assert len({digest("ab"), digest("a", "b"), digest(["a", "b"]), digest("1"), digest(1)}) == 5


def test_a_fingerprint_is_the_content_s_and_not_the_place_s_or_time_s(tmp_path: Path) -> None:
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
def test_a_fingerprint_sees_both_ends_of_a_large_file(tmp_path: Path, place: int) -> None:
    content = bytearray(3 << 20)
    one = folder_with(tmp_path / "x" / "vae", a=bytes(content))
    content[place] = 1
    assert fingerprint([one]) != fingerprint([folder_with(tmp_path / "y" / "vae", a=bytes(content))])


def test_copied_files_outlive_the_source(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "source", a=b"123")
    link_or_copy(source, tmp_path / "target")
    (source / "a").unlink()
    assert (tmp_path / "target" / "a").read_bytes() == b"123"


def test_a_link_in_the_source_becomes_a_file_of_its_own(tmp_path: Path) -> None:
    folder_with(tmp_path / "blobs", b=b"123")  # as the hub's cache lays files out
    source = folder_with(tmp_path / "source")
    (source / "a").symlink_to(tmp_path / "blobs" / "b")
    link_or_copy(source, tmp_path / "target")
    (tmp_path / "blobs" / "b").unlink()
    assert (tmp_path / "target" / "a").read_bytes() == b"123"


def test_a_compiler_that_is_missing_is_no_fault_of_a_disk() -> None:
    assert (
        system_error(
            OSError("CUDA_HOME environment variable is not set. Please set it to your CUDA install root.")
        )
        is None
    )
    assert (
        system_error(OSError("there is no config.json")) is not None
    )  # as diffusers says of a folder that went away
