"""Engines with NVMe: folders that can be written to, and the memory that all of a rank's engines lock."""

from pathlib import Path

import pytest

from wandistiller.config import nvme_checks
from wandistiller.objectives.objective import read_objective
from wandistiller.utils.files import read_json
from wandistiller.wan.pipeline import open_wan

NVME = "ds_configs/student/zero3_nvme.json"


@pytest.mark.parametrize(
    ("parts", "engines"),
    [
        ({"objective": "velocity"}, 1),
        ({"objective": "dmd2"}, 2),
        ({"objective": "dmd2", "others_ds": "ds_configs/student/zero3_offload.json"}, 1),
    ],
)
def test_a_critic_on_nvme_locks_memory_as_its_student_does(
    wan1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str], engines: int
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(nvme_checks, "lock_problems", lambda nbytes: locked.append(nbytes) or [])
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[3]
    folder = open_wan(str(wan1))
    given = {"student_ds": read_json(root / NVME), "student_transformer": folder.config, "folder": folder}
    nvme_checks.nvme_problems(given, 2)
    own = {"others_ds": read_json(root / parts["others_ds"])} if "others_ds" in parts else {}
    nvme_checks.nvme_problems(given | own | {"objective": read_objective(parts["objective"])}, 2)
    assert locked[1] == engines * locked[0] > 0
