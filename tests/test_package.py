"""`pip install .` carries all that the commands need."""

import sys
from pathlib import Path

import pytest
from ranks import ROOT, run


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed this package alone."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    run([*pip, str(ROOT)])
    return folder


@pytest.mark.parametrize("source", ["wandistiller", "ds_configs"])
def test_installation_holds_every_tracked_file(source: str, site: Path) -> None:
    tracked = run(["git", "ls-files", source]).stdout.split()
    missing = [t for t in tracked if not (site / (t if source == "wandistiller" else f"wandistiller/{t}")).is_file()]
    assert tracked and not missing


def test_installed_package_finds_its_data_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    command = ["train", "--teacher_path", "tiny", "--data_path", "tiny", "--output_dir", "run", "--dry_run"]
    done = run([sys.executable, "-m", "wandistiller", *command], cwd=tmp_path, PYTHONPATH=str(site))
    assert "1008 prompts" in done.stderr and not (tmp_path / "run").exists()
