"""What is on the disk when: a power failure leaves nothing that speaks of what it has lost."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from wandistiller.export.output import replaced
from wandistiller.utils.files import atomic


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were on the disk when something was flushed or renamed, in order."""
    done, fsync = [], os.fsync

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def renamed(self: Path, target: Path) -> Path:
        done.append("renamed")
        os.rename(self, target)
        return target

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(Path, "rename", renamed)
    return done


def test_a_file_and_its_name_are_on_the_disk_when_the_block_has_ended(
    tmp_path: Path, disk: list[str]
) -> None:
    with atomic(tmp_path / "DONE") as temporary:
        temporary.write_text("x")
    assert disk == [temporary.name, "renamed", tmp_path.name]


@pytest.mark.parametrize("writer", [atomic, replaced])
def test_all_of_a_folder_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, disk: list[str], writer: Callable
) -> None:
    """Else a run's DONE could outlive its student when the power fails."""
    with writer(tmp_path / "student") as temporary:
        (temporary / "transformer").mkdir(parents=True)
        (temporary / "transformer" / "weights").write_bytes(b"1")
    assert sorted(disk[:3]) == sorted([temporary.name, "transformer", "weights"])
    assert disk[3:] == ["renamed", tmp_path.name]
