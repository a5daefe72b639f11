"""The loss curve is the same for every ZeRO stage and rank count, and that of a plain PyTorch loop."""

import json
from pathlib import Path

import pytest
import torch
from plain import plain_losses
from ranks import has_async_io, losses, wandistiller, write_json
from recipes import recipe, student_engine

from wandistiller.check import read_job
from wandistiller.config import STRATEGIES, RunConfig, read_json
from wandistiller.learned import by_sigma

STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def reference(folder: Path, wan2: Path, one_rank: torch.device) -> list[float]:
    return plain_losses(read_job(RunConfig(**recipe(folder, wan2, output_dir=str(folder / "plain"))), world=1), STEPS)


def train(folder: Path, wan2: Path, name: str, ranks: int, **more: object) -> Path:
    output = folder / name
    file = write_json(folder / f"{name}.json", recipe(folder, wan2, output_dir=str(output), **more))
    wandistiller("train", "--recipe", file, ranks=ranks)
    return output


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_first_20_losses_equal_a_plain_pytorch_loop(
    stage: int, ranks: int, folder: Path, wan2: Path, reference: list[float]
) -> None:
    output = train(folder, wan2, f"zero{stage}_{ranks}", ranks, deepspeed_config=student_engine(stage))
    assert losses(output) == pytest.approx(reference, rel=1e-5)
    assert len(reference) == STEPS


def test_loss_curve_does_not_depend_on_accumulation(folder: Path, wan2: Path, reference: list[float]) -> None:
    whole = student_engine(2) | {"train_micro_batch_size_per_gpu": 8}
    assert losses(train(folder, wan2, "whole", 1, deepspeed_config=whole)) == pytest.approx(reference, rel=1e-5)


def test_replicated_teacher_gives_the_same_losses(folder: Path, wan2: Path, reference: list[float]) -> None:
    output = train(folder, wan2, "replicated", 2, teacher_deepspeed_config={"zero_optimization": {"stage": 0}})
    assert losses(output) == pytest.approx(reference, rel=1e-5)


@pytest.fixture(scope="module")
def of_replicas(folder: Path, wan2: Path) -> list[float]:
    engine = {"zero_optimization": {"stage": 0}}
    return losses(train(folder, wan2, "replicas", 2, teacher_deepspeed_config=engine, max_steps=4))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loss_curve_is_bitwise_the_same_for_every_placement(
    strategy: str, folder: Path, wan2: Path, of_replicas: list[float]
) -> None:
    if strategy == "disk" and not has_async_io():
        pytest.skip("no libaio here")
    given = recipe(folder, wan2, output_dir=str(folder / strategy), max_steps=4, teacher_device_strategy=strategy,
                   teacher_dtype="float32")  # fmt: skip
    del given["teacher_deepspeed_config"]
    wandistiller("train", "--recipe", write_json(folder / f"{strategy}.json", given), ranks=2, cwd=folder)
    assert losses(folder / strategy) == of_replicas


def test_student_of_two_experts_trains_each_on_its_side_of_the_boundary(folder: Path, wan2: Path) -> None:
    output = train(folder, wan2, "two", 2, student_config={"num_layers": 2, "experts": "two"}, max_steps=6)
    index = (output / "student" / "model_index.json").read_text()
    assert '"boundary_ratio": 0.875' in index and (output / "student" / "transformer_2").is_dir()
    assert len(losses(output)) == 6


def test_the_loss_in_each_band_of_sigma_is_that_of_its_samples() -> None:
    found = by_sigma(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0.05, 0.19, 0.2, 1.0]))
    assert found == {"0-0.2": 1.5, "0.2-0.4": 4.0, "0.8-1": 8.0}


def test_the_bands_do_not_depend_on_the_ranks(folder: Path, wan2: Path) -> None:
    runs = []
    for ranks in (1, 2):
        output = train(folder, wan2, f"bands_{ranks}", ranks, max_steps=3, deepspeed_config=student_engine(2))
        runs.append([json.loads(line)["loss_by_sigma"] for line in (output / "metrics.jsonl").read_text().splitlines()])
    for one, two in zip(*runs, strict=True):
        assert two == pytest.approx(one, rel=1e-5) and len(one) >= 1


@pytest.mark.parametrize("experts", [1, 2])
def test_a_student_s_secondary_partitions_change_no_loss(experts: int, wan1: Path, wan2: Path, tmp_path: Path) -> None:
    """With them it is gathered among the ranks of a node."""
    found = []
    for ranks in (1, 2):
        zero = student_engine(3)
        zero["zero_optimization"]["zero_hpz_partition_size"] = ranks
        given = recipe(tmp_path, (wan1, wan2)[experts - 1], output_dir=str(tmp_path / str(ranks)), max_steps=3,
                       deepspeed_config=zero, student_config={"num_layers": 1, "experts": ("one", "two")[experts - 1]},
                       teacher_deepspeed_config=read_json("ds_configs/teacher/sharded_node.json"))  # fmt: skip
        wandistiller("train", "--recipe", write_json(tmp_path / "r.json", given), ranks=2)
        found.append(losses(tmp_path / str(ranks)))
    assert found[0] == found[1]
