"""What does not go together: engines with NVMe on this machine."""

from pathlib import Path
from typing import Any

import pytest
from recipes import recipe

from wandistiller.config import cross_checks
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.utils.files import read_json


def problems(folder: Path, wan: Path, swap: Path, **more: Any) -> list[str]:
    """The problems of a student on NVMe on this machine, as if DeepSpeed's async_io could be built here."""
    ds = read_json("ds_configs/student/zero3_nvme.json")
    for section in ("offload_param", "offload_optimizer"):
        ds["zero_optimization"][section]["nvme_path"] = str(swap)
    given = recipe(folder, wan, output_dir=str(folder / "out"), deepspeed_config=ds, **more)
    job = read_job(RunConfig(**given), 2, here=False)
    return cross_checks.combined_problems(job, 2, here=True)


def test_a_critic_on_nvme_locks_memory_as_its_student_does(
    wan1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(cross_checks, "lock_problems", lambda nbytes: locked.append(nbytes) or [])
    for objective in ("velocity", "dmd2"):
        assert problems(tmp_path, wan1, tmp_path / "swap", objective=objective) == []
    assert locked[1] == 2 * locked[0] > 0


def test_a_swap_folder_that_cannot_be_written_to_is_known_before_the_run(wan1: Path, tmp_path: Path) -> None:
    found = [text for text in problems(tmp_path, wan1, Path("/proc/swap")) if "nvme_path" in text]
    assert [text.partition(".")[0] for text in found] == [
        "`nvme_path` is /proc/swap, which is the system's own folder"
    ]
