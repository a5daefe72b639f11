"""Runs with sums of objectives: one loss curve in any engine, the export, a teacher that is not loaded."""

from pathlib import Path
from typing import Any

import pytest
from diffusers import WanPipeline, WanTransformer3DModel
from PIL import Image
from ranks import losses, metrics, wandistiller
from recipes import PROMPTS, recipe_file, student_engine, train
from small_wan import make_wan

from wandistiller.utils.files import read_json

SUM = ["velocity", {"name": "feature", "weight": 0.5}, {"name": "trajectory", "weight": 2}]
NARROW = {"init": "random", "num_layers": 2, "num_attention_heads": 1}  # half the small teacher's width
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objectives")


def trained(folder: Path, wan: Path, name: str, ranks: int, **more: Any) -> Path:
    usual = {"student_config": NARROW, "objective": SUM, "max_steps": STEPS}
    return train(folder, wan, name, ranks=ranks, **usual | more)


@pytest.fixture(scope="module")
def reference(folder: Path, wan2: Path) -> Path:
    return trained(folder, wan2, "zero2_1", 1, save_every=2)


def test_losses_of_a_sum_are_weighted_terms_that_change_and_do_not_depend_on_ranks_stage_or_accumulation(
    folder: Path, wan2: Path, reference: Path
) -> None:
    output = trained(folder, wan2, "zero3_2", 2, deepspeed_config=student_engine(3))
    assert losses(output) == pytest.approx(losses(reference), rel=1e-5)
    for ours, line in zip(metrics(output), metrics(reference), strict=True):
        terms = line["losses"]  # unweighted
        assert ours["losses"] == pytest.approx(terms, rel=1e-5)
        assert line["loss"] == pytest.approx(
            terms["velocity"] + 0.5 * terms["feature"] + 2 * terms["trajectory"]
        )
    columns = zip(*(line["losses"].values() for line in metrics(reference)), strict=True)
    assert all(len(set(of_term)) == STEPS for of_term in columns)


CONSISTENCY = {"name": "consistency", "intervals": 8, "edges": 2}


def test_losses_of_consistency_do_not_depend_on_ranks_stage_or_accumulation_and_a_resumed_run_has_them(
    folder: Path, wan2: Path
) -> None:
    given = {"objective": CONSISTENCY, "student_config": NARROW | {"experts": "two"}}
    one = trained(folder, wan2, "consistency_1", 1, save_every=2, **given)
    two = trained(folder, wan2, "consistency_2", 2, deepspeed_config=student_engine(3), **given)
    assert losses(two) == pytest.approx(losses(one), rel=1e-5) and len(set(losses(one))) == STEPS
    middle = str(one / "checkpoints" / "step_00000002")
    resumed = trained(folder, wan2, "consistency_3", 1, resume=middle, **given)
    assert losses(resumed) == losses(one)[2:]


def test_a_resumed_run_goes_on_with_its_projections(folder: Path, wan2: Path, reference: Path) -> None:
    output = trained(folder, wan2, "resumed", 1, resume=str(reference / "checkpoints" / "step_00000002"))
    assert losses(output) == losses(reference)[2:]


def test_an_exported_student_has_no_projections_and_loads_in_diffusers(reference: Path) -> None:
    model, info = WanTransformer3DModel.from_pretrained(
        reference / "student" / "transformer", output_loading_info=True
    )
    assert info["unexpected_keys"] == info["missing_keys"] == [] and len(model.blocks) == 2
    assert WanPipeline.from_pretrained(reference / "student").transformer.config.num_attention_heads == 1


@pytest.fixture(scope="module")
def spoilt(folder: Path) -> Path:
    """A teacher whose cache is complete and whose weights have since been filled with what is no number."""
    wan = make_wan(folder / "wan", experts=1, layers=2, heads=8)
    wandistiller("prepare", "--recipe", recipe_file(folder, wan, "prepared", rollout_path=True))
    (file,) = (wan / "transformer").glob("*.safetensors")
    content, ends = bytearray(file.read_bytes()), 1 << 20  # by which a cache knows its teacher
    assert len(content) > 4 * ends
    content[ends:-ends] = b"\xff" * (len(content) - 2 * ends)
    file.write_bytes(content)
    return wan


def test_a_trajectory_run_does_not_load_the_teacher_and_shows_its_cached_pictures(
    folder: Path, spoilt: Path
) -> None:
    prompts = PROMPTS.splitlines()[:2]
    output = trained(folder, spoilt, "trajectory", 1, objective="trajectory", sample_prompts=prompts)
    assert len(losses(output)) == STEPS
    with Image.open(max((output / "samples").glob("*.png"))) as picture:
        assert picture.height > 2 * 128  # two rows of tiles
    start = read_json(output / "student_start.json")
    assert start.keys() == {"parameters"} and 0 < start["parameters"]["student"]


def test_a_run_that_needs_that_teacher_names_its_fault(folder: Path, spoilt: Path) -> None:
    file = recipe_file(folder, spoilt, "velocity", student_config=NARROW)
    done = wandistiller("train", "--recipe", file, code=2)
    assert "holds numbers that are not finite" in done.stderr
