"""Swapping the student's JSON never changes what is learned."""

from pathlib import Path

import pytest
import torch
from on_ranks import runs
from plain import plain_losses
from ranks import STUDENTS, call, runs_here
from recipes import recipe

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job

STEPS = 8  # bench/curves.py runs 20
BF16_TOLERANCE = 1e-2
"""Greatest relative difference of two bf16 curves; measured by bench/curves.py."""
pytestmark = pytest.mark.slow  # test_training.py has two, test_ds_config_engines.py each stage on one rank


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def curves(request: pytest.FixtureRequest, folder: Path, wan2: Path) -> dict[str, list[float]]:
    engines = [
        f"{name} {precision}" for name in filter(runs_here, STUDENTS) for precision in ("float32", "bf16")
    ]
    return call(runs.curves, folder, wan2, STEPS, engines, ranks=request.param)[0]


@pytest.fixture(scope="module")
def plain(folder: Path, wan2: Path, one_rank: torch.device) -> dict[str, list[float]]:
    """The same run in plain PyTorch."""
    job = read_job(RunConfig(**recipe(folder, wan2, output_dir=str(folder / "plain"))), world=1)
    return {"float32": plain_losses(job, STEPS), "bf16": plain_losses(job, STEPS, torch.bfloat16)}


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bf16", BF16_TOLERANCE)])
@pytest.mark.parametrize("name", STUDENTS)
def test_every_student_json_gives_the_curve_of_plain_pytorch(
    name: str, precision: str, tolerance: float, curves: dict[str, list[float]], plain: dict[str, list[float]]
) -> None:
    if not runs_here(name):
        pytest.skip("no libaio here")
    assert curves[f"{name} {precision}"] == pytest.approx(plain[precision], rel=tolerance)
