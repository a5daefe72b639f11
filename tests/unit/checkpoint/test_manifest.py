"""The order of checkpoints, and their parts."""

import subprocess
from pathlib import Path

from nfs_client import nfs_client

from wandistiller.checkpoint.manifest import (
    commit,
    finish_part,
    folder_name,
    part_file,
    rotate,
    set_aside_newer,
    steps,
)

IN_ORDER = [folder_name(step) for step in (0, 1, 10, 100_000_000)]


def saved(folder: Path) -> Path:
    for name in (*IN_ORDER, "step_x", "frozen", ".step_00000002.tmp"):
        (folder / name).mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return [one.name for one in reversed(steps(folder))]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    assert names(saved(tmp_path)) == IN_ORDER


def test_the_newest_up_to_one_are_kept(tmp_path: Path) -> None:
    rotate(saved(tmp_path) / IN_ORDER[2], keep=2)
    assert names(tmp_path) == IN_ORDER[1:]
    assert (tmp_path / "latest").read_text() == f"{IN_ORDER[2]}\n"


def test_those_after_the_one_that_a_run_goes_on_from_are_set_aside(tmp_path: Path) -> None:
    aside = [one.name for one in set_aside_newer(saved(tmp_path), 1)]
    assert names(tmp_path) == IN_ORDER[:2]
    assert aside == [f"aside_{name}" for name in reversed(IN_ORDER[2:])]


def test_a_part_that_another_node_writes_is_seen_at_once(tmp_path: Path) -> None:
    """By a client of NFS too, which remembers that it was not there."""
    folder, target, waited = tmp_path / "new", tmp_path / "step", []
    for own in (folder, tmp_path):
        own.mkdir(exist_ok=True)
        finish_part(own, 0, {})

    def stopped() -> bool:
        if not waited:
            subprocess.run(["cp", part_file(tmp_path, 0), part_file(folder, 1)], check=True)
        waited.append(1)
        return len(waited) > 3

    with nfs_client(tmp_path):
        commit(folder, target, 2, stopped)
    assert target.is_dir() and len(waited) == 1
