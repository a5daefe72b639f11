"""Locks of builds."""

import logging
import os
import time
from pathlib import Path

import pytest

from wandistiller.utils import extension_locks


@pytest.fixture(params=["given folder", "default folder"])
def lock(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build's lock in the folder that the environment names, or in torch's own for this Python."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path) if request.param == "given folder" else "")
    monkeypatch.setattr(extension_locks, "get_default_build_root", lambda: str(tmp_path))
    folder = tmp_path / ("cpu_adam" if request.param == "given folder" else "py310_cpu/cpu_adam")
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    return folder / "lock"


def test_the_lock_of_a_killed_build_is_removed(lock: Path) -> None:
    os.utime(lock, (time.time() - extension_locks.STALE - 1,) * 2)
    extension_locks.remove_stale_locks()
    assert not lock.exists()


def test_the_lock_of_a_build_that_may_still_run_stays_and_is_named(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("wandistiller").propagate = True
    with caplog.at_level("WARNING"):
        extension_locks.remove_stale_locks()
    assert lock.exists() and f"remove {lock}" in caplog.text
