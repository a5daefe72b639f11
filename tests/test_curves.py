"""Swapping the student's JSON never changes what is learned."""

import json
from pathlib import Path

import pytest
import torch
from plain import plain_losses
from ranks import ROOT, has_async_io, program
from recipes import recipe

from wandistiller.check import read_job
from wandistiller.config import RunConfig

STEPS = 8  # bench/curves.py runs 20
NAMES = sorted(p.stem for p in (ROOT / "ds_configs" / "student").glob("zero*.json"))
BF16_TOLERANCE = 1e-2
"""Greatest relative difference of two bf16 curves; measured by bench/curves.py."""


def runs_here(name: str) -> bool:
    return name != "zero3_nvme" or has_async_io()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("curves")


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def curves(request: pytest.FixtureRequest, folder: Path, wan2: Path) -> dict[str, list[float]]:
    results = folder / f"{request.param}.json"
    names = filter(runs_here, NAMES)
    program(ROOT / "tests" / "curves_on_ranks.py", folder, wan2, str(STEPS), results, *names, ranks=request.param)
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def plain(folder: Path, wan2: Path, one_rank: torch.device) -> dict[str, list[float]]:
    """The same run in plain PyTorch."""
    job = read_job(RunConfig(**recipe(folder, wan2, output_dir=str(folder / "plain"))), world=1)
    return {"float32": plain_losses(job, STEPS), "bf16": plain_losses(job, STEPS, torch.bfloat16)}


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("bf16", BF16_TOLERANCE)])
@pytest.mark.parametrize("name", NAMES)
def test_every_student_json_gives_the_curve_of_plain_pytorch(
    name: str, precision: str, tolerance: float, curves: dict[str, list[float]], plain: dict[str, list[float]]
) -> None:
    if not runs_here(name):
        pytest.skip("no libaio here")
    assert curves[f"{name} {precision}"] == pytest.approx(plain[precision], rel=tolerance)
