"""What a run says of the machines that it ran on."""

import platform
from pathlib import Path

import pytest
import torch

from wandistiller.monitoring.environment import collect, cpu_model


@pytest.mark.usefixtures("one_rank")
def test_a_run_says_its_node_its_launcher_and_its_versions() -> None:
    said = collect()
    (node,) = said["nodes"]
    assert (said["launcher"], node["host"], node["ranks"]) == ("none", platform.node(), 1)
    assert node["cores"] > 0 and node["memory_gib"] > 0 and node["cpu"]
    assert (
        said["versions"].items() >= {"python": platform.python_version(), "torch": torch.__version__}.items()
    )


def test_a_cpu_is_called_by_its_name_or_its_architecture(tmp_path: Path) -> None:
    assert cpu_model(tmp_path) == platform.machine()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A CPU: of 2019\nflags\t: fpu\n")
    assert cpu_model(tmp_path) == "A CPU: of 2019"
