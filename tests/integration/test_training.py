"""The loss curve of every ZeRO stage, rank count and placement is that of a plain PyTorch loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import plain_losses
from ranks import losses, metrics
from recipes import recipe, student_engine, train

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.training.step_result import by_sigma
from wandistiller.utils.files import read_json

STEPS = 8
SHORT: dict[str, Any] = {"max_steps": STEPS, "sample_prompts": []}


@pytest.fixture(scope="module")
def reference(folder: Path, wan2: Path, one_rank: torch.device) -> list[float]:
    return plain_losses(
        read_job(RunConfig(**recipe(folder, wan2, output_dir=str(folder / "plain"))), world=1), STEPS
    )


@pytest.fixture(scope="module")
def zero2(folder: Path, wan2: Path) -> Path:
    """A run of ZeRO-2 on two ranks."""
    return train(folder, wan2, "zero2", deepspeed_config=student_engine(2), **SHORT)


@pytest.fixture(scope="module")
def whole_batches(folder: Path, wan2: Path) -> Path:
    """A run on one rank without accumulation, in deterministic arithmetic."""
    engine = student_engine(2, train_micro_batch_size_per_gpu=8)
    return train(folder, wan2, "whole", ranks=1, deepspeed_config=engine, deterministic=True, **SHORT)


def test_8_losses_and_bands_of_sigma_equal_a_plain_pytorch_loop_s_on_any_ranks_and_with_accumulation(
    zero2: Path, whole_batches: Path, reference: list[float]
) -> None:
    assert losses(zero2) == pytest.approx(reference, rel=1e-5) and len(reference) == STEPS
    assert losses(whole_batches) == pytest.approx(reference, rel=1e-5)
    assert read_json(whole_batches / "resolved" / "run.json")["deterministic"] is True
    bands = ([line["loss_by_sigma"] for line in metrics(output)] for output in (zero2, whole_batches))
    for two, one in zip(*bands, strict=True):
        assert two == pytest.approx(one, rel=1e-5) and len(one) >= 1


def test_the_loss_in_each_band_of_sigma_is_that_of_its_samples() -> None:
    found = by_sigma(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0.05, 0.19, 0.2, 1.0]))
    assert found == {"0-0.2": 1.5, "0.2-0.4": 4.0, "0.8-1": 8.0}


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2])
def test_a_student_s_secondary_partitions_change_no_loss(
    experts: int, wan1: Path, wan2: Path, tmp_path: Path
) -> None:
    """With them it is gathered among the ranks of a node."""
    teacher = read_json("ds_configs/teacher/sharded_node.json")
    student = {"num_layers": 1, "experts": ("one", "two")[experts - 1]}
    found = []
    for ranks in (1, 2):
        zero = student_engine(3)
        zero["zero_optimization"]["zero_hpz_partition_size"] = ranks
        more = {"deepspeed_config": zero, "teacher_deepspeed_config": teacher, "student_config": student}
        found.append(losses(train(tmp_path, (wan1, wan2)[experts - 1], str(ranks), max_steps=3, **more)))
    assert found[0] == found[1]
