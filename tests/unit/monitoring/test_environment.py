"""Hardware and software of a run."""

import platform
from pathlib import Path

import pytest
import torch

from wandistiller.monitoring.environment import collect, cpu_model


@pytest.mark.usefixtures("one_rank")
def test_node_launcher_and_versions_are_collected() -> None:
    collected = collect()
    (node,) = collected["nodes"]
    assert (collected["launcher"], node["host"], node["ranks"]) == ("none", platform.node(), 1)
    assert node["cores"] > 0 and node["memory_gib"] > 0 and node["cpu"]
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    assert collected["versions"].items() >= versions.items()


def test_a_cpu_has_its_name_or_else_its_architecture(tmp_path: Path) -> None:
    assert cpu_model(tmp_path) == platform.machine()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU: of 2019\nflags\t: fpu\n")
    assert cpu_model(tmp_path) == "A CPU: of 2019"
