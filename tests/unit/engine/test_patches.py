"""One process builds an extension at a time, whatever a killed build has left."""

import errno
import fcntl
import re
import threading
import time
from pathlib import Path

import pytest

from wandistiller.engine.patches import sole_builder
from wandistiller.utils import files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(files, "WAIT", 0.05)
    return tmp_path


def test_the_lock_file_of_a_killed_build_is_removed_at_once(folder: Path) -> None:
    (folder / "cpu_adam").mkdir()
    (folder / "cpu_adam" / "lock").touch()
    with sole_builder("cpu_adam"):
        assert not (folder / "cpu_adam" / "lock").exists()


def test_another_s_build_is_not_disturbed_on_a_file_system_without_locks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There torch's own file is the only sign that somebody builds."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (folder / "cpu_adam").mkdir()
    (folder / "cpu_adam" / "lock").touch()
    with sole_builder("cpu_adam"):
        assert (folder / "cpu_adam" / "lock").exists()


def test_a_process_waits_while_another_builds(folder: Path) -> None:
    seen = []
    with (folder / ".cpu_adam.lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: _build(seen))
        waiting.start()
        time.sleep(0.2)
        seen.append("the other has built")
    waiting.join()
    assert seen == ["the other has built", "built"]


def _build(seen: list[str]) -> None:
    with sole_builder("cpu_adam"):
        seen.append("built")


def test_a_build_says_so_and_how_long_it_took_and_a_second_one_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with sole_builder("cpu_adam"):
            (folder / "cpu_adam" / "cpu_adam.so").touch()
    first, last = caplog.messages
    assert "cpu_adam is compiled into" in first and re.search(r"cpu_adam took \d+ s", last)
