"""Parts of a run together with this machine: the memory that all of a rank's engines on NVMe lock."""

from pathlib import Path

import pytest
from recipes import recipe

from wandistiller.config import cross_checks
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job


def test_a_critic_on_nvme_locks_memory_as_its_student_does(
    wan1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(cross_checks, "lock_problems", lambda nbytes: locked.append(nbytes) or [])
    monkeypatch.chdir(tmp_path)
    settings = recipe(tmp_path, wan1, output_dir="out", deepspeed_config="ds_configs/student/zero3_nvme.json")
    for objective in ("velocity", "dmd2"):
        job = read_job(RunConfig(**settings | {"objective": objective}), 2, here=False)
        cross_checks.combined_problems(job, 2, here=True)
    assert locked[1] == 2 * locked[0] > 0
