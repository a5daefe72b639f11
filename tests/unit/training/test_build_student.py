"""Calibration before training: independent of ranks and placement, kept across a resume."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from networks import network_of
from recipes import SHARDED, recipe, train
from slow_cases import slow_but
from small_wan import small_transformer
from states import state
from styles import style
from torch import nn
from trainers import job_of, parts_of

from wandistiller.batch import Batch
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.tensor_cache import Measured
from wandistiller.experts import Expert
from wandistiller.student.calibration import ROUNDS, VelocityError, error_rows, importance, velocity_error
from wandistiller.teacher.base import (
    LocalTeacher,
    local_modules,
)
from wandistiller.training.build_student import begins_as_teacher, initial_learners
from wandistiller.training.prepare import ranks_of
from wandistiller.training.step_result import by_sigma
from wandistiller.utils.files import read_json
from wandistiller.utils.keyed_random import keyed_normal

STUDENT = {
    "num_layers": 2,
    "keep_layers": "importance",
    "num_attention_heads": 1,
    "ffn_dim": 0.5,
    "experts": "two",
}
REPLICATED = {"zero_optimization": {"stage": 0}}
OWNER = {"wandistiller": {"placement": "owner", "owner_rank": 1}}
OWNER_INT8 = {"wandistiller": {"placement": "owner", "weights": "int8"}}
FILES = ("lineage.json", "importance.json", "student_start.json")


def without(network: nn.Module, number: int) -> None:
    """Make a block the identity."""
    block = network.blocks[number]
    for last in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
        last.weight.data.zero_()
        last.bias.data.zero_()


def batches(n: int = 2) -> list[Batch]:
    x_BCFHW = keyed_normal((n, 16, 1, 4, 4), "x")
    return [state(x_BCFHW, torch.full((n,), 0.4), keyed_normal((n, 8, 32), "text"), e) for e in Expert]


def two_experts(layers: int = 4) -> LocalTeacher:
    networks = (network_of(small_transformer(seed, layers).eval()) for seed in range(2))
    return LocalTeacher(dict(zip(Expert, networks, strict=True)))


@pytest.mark.usefixtures("one_rank")
def test_a_block_that_does_nothing_is_the_least_important() -> None:
    teacher = two_experts()
    for network in teacher.experts.values():
        without(network.module, 2)
    first, last = importance(teacher, batches(), 4, 3)
    assert first[2] == 0 and min(first[i] for i in (0, 1, 3)) > 0
    assert list(last) == [0, 1, 3]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("layers", "keep", "left"),
    slow_but(
        [(4, 2, [4, 3, 2])],
        [(4, 2, [4, 3, 2]), (4, 4, [4]), (12, 1, [12, 10, 8, 6, 5, 4, 3, 2, 1])],
    ),
)
def test_blocks_are_dropped_in_few_rounds(layers: int, keep: int, left: list[int]) -> None:
    rounds = importance(two_experts(layers), batches(1), layers, keep)
    assert [len(r) for r in rounds] == left and len(rounds) <= ROUNDS + 1


@pytest.mark.usefixtures("one_rank")
def test_the_error_rises_as_without_the_block_and_the_teacher_stays_as_it_was() -> None:
    teacher, shorter = two_experts(), two_experts()
    for network in shorter.experts.values():
        without(network.module, 1)
    before = [teacher.velocity(b) for b in batches()]
    error = velocity_error(batches(), before, shorter.velocity)
    assert importance(teacher, batches(), 4, 4)[0][1] == pytest.approx(error.relative(), rel=1e-6)
    importance(teacher, batches(), 4, 3)
    assert all(torch.equal(v, teacher.velocity(b)) for v, b in zip(before, batches(), strict=True))


def calls_of(teacher: LocalTeacher) -> list[nn.Module]:
    """The blocks whose feed-forward layers compute, as they do."""
    calls: list[nn.Module] = []
    for block in (b for network in teacher.experts.values() for b in network.blocks):
        block.ffn.register_forward_hook(lambda *_, block=block: calls.append(block))
    return calls


@pytest.mark.usefixtures("one_rank")
def test_blocks_that_are_left_out_compute_nothing() -> None:
    teacher = two_experts()
    calls = calls_of(teacher)
    importance(teacher, batches(), 4, 3)
    assert len(calls) == 2 * (4 + 4 * 3 + 3 * 2)  # the whole teacher, four without a block, three without two


@pytest.mark.usefixtures("one_rank")
def test_importance_that_was_measured_before_a_stop_is_not_measured_again(tmp_path: Path) -> None:
    teacher, kept = two_experts(), Measured(tmp_path)
    with patch.object(Measured, "write", autospec=True, side_effect=Measured.write) as written:
        rounds = importance(teacher, batches(), 4, 3, kept)
    (tmp_path / f"{written.call_args.args[1]}.safetensors").unlink()  # the last
    calls = calls_of(teacher)
    assert importance(teacher, batches(), 4, 3, kept) == rounds == importance(two_experts(), batches(), 4, 3)
    assert len(calls) == 2 * (4 + 2)


def test_a_velocity_of_zeros_has_the_relative_error_1_in_every_band() -> None:
    batch = replace(batches()[0], sigma_B=torch.tensor([0.2, 0.9]))
    error = VelocityError(error_rows(batch, torch.zeros(2, 3), torch.randn(2, 3)))
    assert error.relative() == 1 and error.by_sigma() == {"0-0.25": 1.0, "0.75-1": 1.0}


def test_a_band_has_its_lower_end_and_the_last_both_in_losses_and_in_errors() -> None:
    sigma_N = torch.tensor([0.0, 0.5, 1.0])
    batch = replace(batches()[0], sigma_B=sigma_N)
    error = VelocityError(error_rows(batch, torch.zeros(3, 3), torch.randn(3, 3)))
    assert list(error.by_sigma()) == ["0-0.25", "0.5-0.75", "0.75-1"]
    assert list(by_sigma(sigma_N, torch.tensor([0.0, 0.6, 1.0]))) == ["0-0.2", "0.6-0.8", "0.8-1"]


def begun(
    folder: Path, wan2: Path, name: str, ranks: int, teacher: dict[str, Any], steps: int = 1, **more: Any
) -> Path:
    """Train after measuring anew: runs of one cache share what was measured."""
    shutil.rmtree(folder / "cache" / "measured", ignore_errors=True)
    return begun_again(folder, wan2, name, ranks, teacher, steps, **more)


def begun_again(
    folder: Path, wan2: Path, name: str, ranks: int, teacher: dict[str, Any], steps: int = 1, **more: Any
) -> Path:
    more |= {"student_config": STUDENT, "max_steps": steps, "teacher_deepspeed_config": teacher}
    return train(folder, wan2, name, ranks=ranks, **more)


@pytest.fixture(scope="module")
def alone(folder: Path, wan2: Path) -> Path:
    return begun(folder, wan2, "alone", 1, REPLICATED)


def numbers(value: Any) -> list[Any]:
    """The keys and values of a JSON in order, floats up to rounding."""
    if isinstance(value, dict):
        return [n for k, v in value.items() for n in (k, *numbers(v))]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [pytest.approx(value, rel=1e-4) if isinstance(value, float) else value]


def same_start(output: Path, alone: Path) -> bool:
    pairs = [[json.loads((o / file).read_text()) for o in (output, alone)] for file in FILES]
    return all(numbers(actual) == numbers(expected) for actual, expected in pairs)


@pytest.mark.slow
def test_a_run_that_begins_again_takes_what_was_measured_and_drawn_with_the_teacher(
    folder: Path, wan2: Path, alone: Path
) -> None:
    def kept() -> dict[Path, int]:
        return {file: file.stat().st_ino for file in (folder / "cache" / "measured").rglob("*.safetensors")}

    names = [*FILES, *(f"samples/{file.name}" for file in (alone / "samples").glob("*.png"))]
    before, contents = kept(), [(alone / name).read_bytes() for name in names]
    shutil.rmtree(alone)
    begun_again(folder, wan2, "alone", 1, REPLICATED)
    assert kept() == before and len(before) > 8
    assert [(alone / name).read_bytes() for name in names] == contents


@pytest.mark.parametrize(("name", "teacher"), slow_but([], [("sharded", SHARDED), ("owner", OWNER)]))
def test_two_ranks_measure_and_choose_as_one(
    folder: Path, wan2: Path, alone: Path, name: str, teacher: dict
) -> None:
    assert same_start(begun(folder, wan2, name, 2, teacher), alone)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_layers(folder: Path, wan2: Path, alone: Path) -> None:
    before = (alone / "lineage.json").read_text()
    begun(folder, wan2, "alone", 1, REPLICATED, steps=2)
    assert (alone / "lineage.json").read_text() == before
    assert len((alone / "metrics.jsonl").read_text().splitlines()) == 2


def start_of(folder: Path, wan: Path, **more: Any) -> tuple[int, dict[str, Any]]:
    """Samples that the teacher's networks are called with while a run is built, and what was measured."""
    given = recipe(folder, wan, output_dir=str(folder / "run"), teacher_deepspeed_config=REPLICATED, **more)
    data, _, teacher = parts_of(job := job_of(given))
    samples: list[int] = []
    for network in local_modules(teacher):
        network.register_forward_pre_hook(
            lambda *given: samples.append(len(given[-1]["hidden_states"])), with_kwargs=True
        )
    initial_learners(job, data, teacher, ranks_of(job))
    return sum(samples), json.loads((folder / "run" / "student_start.json").read_text())


def test_lineage_and_resolved_student_name_the_layers_that_were_kept(
    tmp_path: Path, wan2: Path, one_rank: torch.device
) -> None:
    start_of(tmp_path, wan2, student_config=STUDENT)
    files = ("importance.json", "resolved/student.json", "lineage.json")
    measured, student, lineage = (read_json(tmp_path / "run" / file) for file in files)
    kept = measured["kept"]
    assert student["keep_layers"] == kept and len(lineage) == 2
    for expert, actual in lineage.items():
        assert actual["made_of"] == [expert] and actual["kept_layers"] == kept
        assert actual["stands_for"] == [kept[1] - 1, 3]


ADAPTERS = {"student_config": {"experts": "two"}, "lora": {"rank": 4}}


@pytest.mark.parametrize("what", slow_but([ADAPTERS], [ADAPTERS, {"student_config": {"experts": "two"}}]))
def test_a_student_that_is_its_teacher_has_the_error_0_without_a_pass(
    what: dict[str, Any], tmp_path: Path, wan2: Path, one_rank: torch.device
) -> None:
    samples, start = start_of(tmp_path, wan2, **what)
    assert samples == start["relative_velocity_error"] == 0
    assert [*start["relative_velocity_error_by_sigma"].values()] == [0, 0, 0, 0]


@pytest.mark.parametrize(("steps", "number"), slow_but([(100, 8)], [(1, 4), (100, 8)]))
def test_a_start_is_measured_on_a_hundredth_of_the_run_s_samples_or_on_four(
    tmp_path: Path, wan2: Path, one_rank: torch.device, steps: int, number: int
) -> None:
    """Each step has 8 samples."""
    start = {"start": {"high_noise": str(style(wan2, tmp_path / "style.safetensors", "to_q"))}}
    given = ADAPTERS | {"lora": ADAPTERS["lora"] | start}
    samples, numbers = start_of(tmp_path, wan2, max_steps=steps, **given)
    assert samples == number and 0 < numbers["relative_velocity_error"] < 1


@pytest.mark.parametrize(
    ("more", "begins"),
    [
        (ADAPTERS, True),
        ({"student_config": {}}, False),  # one network
        ({"student_config": {"experts": "two", "num_layers": 2}}, False),
        (ADAPTERS | {"teacher_deepspeed_config": {"bf16": {"enabled": True}}}, False),
        (ADAPTERS | {"teacher_deepspeed_config": {"wandistiller": {"weights": "int8"}}}, True),
        (ADAPTERS | {"teacher_deepspeed_config": OWNER_INT8}, False),  # on unquantised copies
    ],
    ids=["adapters", "one", "pruned", "bf16", "quantised base", "unquantised copy"],
)
def test_a_student_begins_as_its_teacher_in_all_that_its_velocities_depend_on(
    more: dict[str, Any], begins: bool, tmp_path: Path, wan2: Path
) -> None:
    given = recipe(tmp_path, wan2, output_dir=str(tmp_path / "run"), **more)
    assert begins_as_teacher(read_job(RunConfig(**given), 2, here=False)) == begins
