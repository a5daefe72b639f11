"""Locks of builds."""

import logging
import os
import time
from pathlib import Path

import pytest

from wandistiller.utils import extension_locks


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    return tmp_path / "cpu_adam" / "lock"


def test_a_killed_build_s_lock_on_which_all_would_wait_is_removed(lock: Path) -> None:
    os.utime(lock, (time.time() - extension_locks.STALE - 1,) * 2)
    extension_locks.remove_stale_locks()
    assert not lock.exists()


def test_a_lock_behind_which_a_compiler_may_work_stays_and_is_named(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("wandistiller").propagate = True
    with caplog.at_level("WARNING"):
        extension_locks.remove_stale_locks()
    assert lock.exists() and f"remove {lock}" in caplog.text


def test_the_default_folder_is_torch_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    made = Path(get_default_build_root()) / "py" / "cpu_adam" / "lock"
    made.parent.mkdir(parents=True)
    made.touch()
    assert extension_locks._locks() == [made]
