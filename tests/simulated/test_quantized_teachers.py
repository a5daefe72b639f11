"""Quantised teachers on simulated GPUs: bitwise torchao's numbers on a CPU."""

from functools import partial
from pathlib import Path

import pytest
from ranks import call, program
from simulated import Simulated, simulated_gpu

pytest.importorskip("torchao")

from on_ranks.quantized import FORMATS, PLACEMENTS, differences

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("weights", FORMATS)
def test_every_placement_of_quantised_weights_is_bitwise_torchao_s_on_gpus(
    weights: str, ranks: int, wan2: Path, tmp_path: Path
) -> None:
    devices = Simulated(tmp_path, gpus=2)
    tasks = [f"{name} {weights} float32" for name in PLACEMENTS]
    start = partial(program, gpus=devices)
    found = call(differences, wan2, tasks, ranks=ranks, start=start)
    assert all(of_rank[task]["difference"] == 0 for of_rank in found for task in tasks)
    assert devices.reports() == ""
