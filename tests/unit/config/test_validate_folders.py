"""Folders that a run may not write to, because they are read, or are the system's."""

from pathlib import Path
from typing import Any

import pytest
from reading import run_of
from small_wan import make_wan

from wandistiller.config.validate import read_job
from wandistiller.utils.errors import ConfigError, folder_problems


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher in teacher/, prompts in data/, and a link to the latter."""
    folder = tmp_path_factory.mktemp("folders")
    make_wan(folder / "teacher")
    (folder / "data/run").mkdir(parents=True)
    (folder / "data/prompts.txt").write_text("a red circle\na blue square\n")
    (folder / "link").symlink_to("data")
    return folder


def problems(here: Path, **given: Any) -> list[str]:
    """The problems of a run with these settings."""
    usual = {"teacher_path": str(here / "teacher"), "data_path": str(here / "data")}
    try:
        read_job(run_of(usual | {"output_dir": str(here / "out")} | given), 1)
    except ConfigError as error:
        return [p for p in error.problems if "mixed with" in p or "system's own" in p]
    return []


@pytest.mark.parametrize(
    ("key", "place", "message"),
    [
        ("output_dir", "data", "which is `data_path`"),
        ("output_dir", "data/run", "which lies in `data_path`"),
        ("output_dir", "link/new", "which lies in `data_path`"),
        ("output_dir", "out/../data", "which is `data_path`"),
        ("cache_dir", "data/cache", "which lies in `data_path`"),
        ("sample_dir", "data", "which is `data_path`"),
        ("output_dir", "teacher", "which is `teacher_path`"),
        ("output_dir", "teacher/new", "which lies in `teacher_path`"),
        ("cache_dir", "teacher", "which is `teacher_path`"),
    ],
)
def test_a_folder_that_is_read_is_not_written_to(here: Path, key: str, place: str, message: str) -> None:
    (found,) = problems(here, **{key: str(here / place)})
    assert found.startswith(f"recipe: `{key}` is {here / place}, {message} {here}")
    assert found.endswith("Name a folder outside it.")


def test_a_relative_path_into_the_data_is_found_too(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here / "data")
    assert len(problems(here, output_dir="run")) == 1


def test_samples_of_a_run_may_not_become_its_data(here: Path) -> None:
    (here / "outer/samples").mkdir(parents=True)
    (here / "outer/samples/prompts.txt").write_text("a red circle\n")
    (found,) = problems(here, output_dir=str(here / "outer"), data_path=str(here / "outer/samples"))
    assert "outer/samples, which is `data_path`" in found


def test_a_folder_above_the_data_may_be_written_to(here: Path) -> None:
    assert problems(here, output_dir=str(here)) == []


@pytest.mark.parametrize("folder", ["/", "/proc/x", "/sys/run", "/dev/run", "/tmp/../proc/x"])
def test_the_system_s_own_folders_are_refused(folder: str) -> None:
    (found,) = folder_problems("output_dir", folder)
    assert found.startswith(f"`output_dir` is {folder}, which is the system's own folder.")


def test_shared_memory_may_be_written_to() -> None:
    assert folder_problems("output_dir", "/dev/shm/run") == []
