"""Runs with sums of objectives: one loss curve whatever the engine; what is exported; what is never loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers import WanPipeline, WanTransformer3DModel
from PIL import Image
from ranks import losses, wandistiller, write_json
from recipes import PROMPTS, recipe, student_engine
from small_wan import make_wan

SUM = ["velocity", {"name": "feature", "weight": 0.5}, {"name": "trajectory", "weight": 2}]
NARROW = {"init": "random", "num_layers": 2, "num_attention_heads": 1}  # half the small teacher's width
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objectives")


def train(folder: Path, wan: Path, name: str, ranks: int, **more: Any) -> Path:
    given = {"student_config": NARROW, "objective": SUM, "max_steps": STEPS, "output_dir": str(folder / name)} | more
    wandistiller("train", "--recipe", write_json(folder / f"{name}.json", recipe(folder, wan, **given)), ranks=ranks)
    return folder / name


def terms(output: Path) -> list[dict[str, float]]:
    """Each step's unweighted losses."""
    return [json.loads(line)["losses"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(folder: Path, wan2: Path) -> Path:
    return train(folder, wan2, "zero2_1", 1, save_every=2)


@pytest.mark.parametrize(
    ("name", "ranks", "engine"),
    [("zero2_2", 2, student_engine(2)), ("zero3_2", 2, student_engine(3)),
     ("zero3_whole", 1, student_engine(3) | {"train_micro_batch_size_per_gpu": 8})],
)  # fmt: skip
def test_losses_of_a_sum_do_not_depend_on_ranks_stage_or_accumulation(
    folder: Path, wan2: Path, reference: Path, name: str, ranks: int, engine: dict
) -> None:
    output = train(folder, wan2, name, ranks, deepspeed_config=engine)
    assert losses(output) == pytest.approx(losses(reference), rel=1e-5)
    for found, expected in zip(terms(output), terms(reference), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_the_weighted_sum_of_the_terms_and_each_changes(reference: Path) -> None:
    for loss, by_term in zip(losses(reference), terms(reference), strict=True):
        assert loss == pytest.approx(by_term["velocity"] + 0.5 * by_term["feature"] + 2 * by_term["trajectory"])
    assert all(len({by_term[name] for by_term in terms(reference)}) == STEPS for name in ("velocity", "feature", "trajectory"))


def test_a_resumed_run_goes_on_with_its_projections(folder: Path, wan2: Path, reference: Path) -> None:
    output = train(folder, wan2, "resumed", 1, resume=str(reference / "checkpoints" / "step_00000002"))
    assert losses(output) == losses(reference)[2:]


def test_an_exported_student_has_no_projections_and_loads_in_diffusers(reference: Path) -> None:
    model, info = WanTransformer3DModel.from_pretrained(reference / "student" / "transformer", output_loading_info=True)
    assert info["unexpected_keys"] == info["missing_keys"] == [] and len(model.blocks) == 2
    assert WanPipeline.from_pretrained(reference / "student").transformer.config.num_attention_heads == 1


@pytest.fixture(scope="module")
def spoilt(folder: Path) -> Path:
    """A teacher whose cache is complete and whose weights have since been filled with what is no number."""
    wan = make_wan(folder / "wan", experts=1, layers=2, heads=8)
    given = recipe(folder, wan, output_dir=str(folder / "prepared"), rollout_path=True)
    wandistiller("prepare", "--recipe", write_json(folder / "prepared.json", given))
    (file,) = (wan / "transformer").glob("*.safetensors")
    content, ends = bytearray(file.read_bytes()), 1 << 20  # by which a cache knows its teacher
    assert len(content) > 4 * ends
    content[ends:-ends] = b"\xff" * (len(content) - 2 * ends)
    file.write_bytes(content)
    return wan


def test_a_trajectory_run_does_not_load_the_teacher_and_shows_its_cached_pictures(folder: Path, spoilt: Path) -> None:
    prompts = PROMPTS.splitlines()[:2]
    output = train(folder, spoilt, "trajectory", 2, objective="trajectory", sample_prompts=prompts)
    assert len(losses(output)) == STEPS
    with Image.open(max((output / "samples").glob("*.png"))) as picture:
        assert picture.height > 2 * 128  # two rows of tiles


def test_a_run_that_needs_that_teacher_says_what_is_wrong_with_it(folder: Path, spoilt: Path) -> None:
    given = recipe(folder, spoilt, output_dir=str(folder / "velocity"), student_config=NARROW)
    done = wandistiller("train", "--recipe", write_json(folder / "velocity.json", given), code=2)
    assert "holds numbers that are not finite" in done.stderr
