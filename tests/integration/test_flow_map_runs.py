"""Runs of a flow map: the same on two ranks and resumed, and drawn by diffusers in any number of steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AnyFlowPipeline
from ranks import losses, wandistiller
from recipes import recipe_file, student_engine, train
from safetensors.torch import load_file
from slow_cases import slow_but

from wandistiller.batch import Conditioning
from wandistiller.checkpoint.facts import Facts
from wandistiller.evaluation.sampling import sampler
from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.network.sampling import denoise
from wandistiller.teacher.base import LocalTeacher
from wandistiller.utils.files import FACTS, read_json
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.pipeline import open_wan

SETTINGS: dict[str, Any] = {"objective": "flow_map", "max_steps": 4, "save_every": 2, "sample_prompts": []}
SETTINGS |= {"guidance_scale": 2.0}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def run(folder: Path, wan1: Path) -> Path:
    return train(folder, wan1, "one", ranks=1, **SETTINGS)


@torch.no_grad()
@pytest.mark.parametrize("steps", slow_but([1, 3], [1, 2, 3, 4, 8, 16]))
def test_stock_diffusers_draws_the_latents_of_sample_in_any_number_of_steps(run: Path, steps: int) -> None:
    pipe = AnyFlowPipeline.from_pretrained(run / "student", dtype=torch.float32)
    noise_BCFHW, text_BLD = keyed_normal((1, 16, 1, 4, 4), "start"), keyed_normal((1, 512, 32), "text")
    size = {"height": 32, "width": 32, "num_frames": 1, "output_type": "latent"}
    theirs = pipe(prompt_embeds=text_BLD, latents=noise_BCFHW, num_inference_steps=steps, **size).frames
    folder, facts = open_wan(str(run / "student")), Facts.read(run / "student" / FACTS)
    weights = folder.reader(Expert.HIGH_NOISE).state(torch.float32).items()
    network = Network.made(folder.config, weights)
    start = (folder, folder.shift, noise_BCFHW, Conditioning(text_BLD), steps)
    velocity = LocalTeacher({Expert.HIGH_NOISE: network}).velocity
    ours, _ = denoise(velocity, *start, sampler(folder, facts, steps), level_dtype=torch.float64)
    assert torch.dist(theirs, ours) < 1e-3 * ours.norm()
    # as a pipeline that no run here made, by its own scheduler
    as_others, _ = denoise(velocity, *start, level_dtype=torch.float64)
    assert torch.dist(as_others, ours) < 1e-5 * ours.norm()


def test_the_second_time_begins_as_the_first_and_learns(run: Path, wan1: Path) -> None:
    before, after = load_file(wan1 / WEIGHTS), load_file(run / "student" / WEIGHTS)
    for n in (1, 2):
        name = f"condition_embedder.{{}}_embedder.linear_{n}.weight"
        first, second = after[name.format("time")], after[name.format("delta")]
        moved = torch.dist(second, before[name.format("time")]) / second.norm()
        assert 0 < moved < 0.5 and not torch.equal(first, second)


def test_the_card_says_that_any_number_of_steps_will_do(run: Path) -> None:
    card = (run / "student" / "README.md").read_text()
    assert "AnyFlowPipeline.from_pretrained" in card and "any number of steps" in card
    index = read_json(run / "student" / "model_index.json")
    assert index["scheduler"] == ["diffusers", "FlowMapEulerDiscreteScheduler"]


def test_comfyui_is_refused_with_the_reason(run: Path, tmp_path: Path) -> None:
    words = ["export", "--checkpoint", run, "--output", tmp_path / "a.safetensors", "--format", "original"]
    assert "where its velocity leads" in wandistiller(*words, code=2).stderr


@pytest.mark.slow
def test_one_and_two_ranks_train_the_same_flow_map(folder: Path, wan1: Path, run: Path) -> None:
    both = train(folder, wan1, "two", ranks=2, **SETTINGS)
    assert losses(both) == pytest.approx(losses(run), rel=1e-4)


@pytest.mark.slow
def test_beside_dmd2_weights_in_parts_learn_what_whole_ones_do(folder: Path, wan1: Path) -> None:
    dmd2 = {"name": "dmd2", "sampler": "flow_map", "critic_updates": 1, "gan": 0.03}
    settings = SETTINGS | {"objective": ["flow_map", dmd2]}
    whole, parts = (
        train(folder, wan1, f"stage_{n}", ranks=2, deepspeed_config=student_engine(n), **settings)
        for n in (2, 3)
    )
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_from_a_student_of_one_time(folder: Path, wan1: Path) -> None:
    stages = [{"name": "match", "max_steps": 2}, {"name": "map", "objective": "flow_map", "max_steps": 2}]
    output = train(folder, wan1, "stages", ranks=1, stages=stages, max_steps=None)
    config = read_json(output / "student" / "transformer" / "config.json")
    assert config["_class_name"] == "AnyFlowTransformer3DModel" and config["gate_value"] == 0.25


def test_wrong_settings_are_told_together_before_any_weight_is_read(
    folder: Path, wan2: Path, run: Path
) -> None:
    two = recipe_file(folder, wan2, "experts", student_config={"experts": "two"}, objective="flow_map")
    assert "one network must lead from noise to data" in wandistiller("train", "--recipe", two, code=2).stderr
    taught = recipe_file(folder, run / "student", "taught", objective="flow_map")
    assert "is a flow map already" in wandistiller("train", "--recipe", taught, code=2).stderr
    words = ["sample", "--model", run / "student", "--prompts", "a red circle", "--output", folder / "none"]
    assert "`steps` is 0" in wandistiller(*words, "--steps", "0", code=2).stderr
    index = run / "student" / "scheduler" / "scheduler_config.json"
    before = index.read_text()
    index.write_text(json.dumps({"_class_name": "UniPCMultistepScheduler", "use_flow_sigmas": True}))
    try:
        assert "FlowMapEulerDiscreteScheduler" in wandistiller(*words, code=2).stderr
    finally:
        index.write_text(before)
