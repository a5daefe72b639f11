"""Runs with sums of objectives: one loss curve in any engine, the export, a teacher that is not loaded."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from networks import network_of
from PIL import Image
from ranks import losses, wandistiller
from recipes import PROMPTS, recipe_file, train
from small_wan import make_wan
from states import state
from torch import Tensor

from wandistiller.batch import Conditioning
from wandistiller.checkpoint.facts import Facts
from wandistiller.evaluation.sampling import sampler
from wandistiller.experts import Expert
from wandistiller.network.sampling import denoise, few_steps
from wandistiller.teacher.base import LocalTeacher
from wandistiller.utils.files import FACTS, read_json
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import transformer
from wandistiller.wan.pipeline import open_wan

SUM = ["velocity", {"name": "feature", "weight": 0.5}, {"name": "trajectory", "weight": 2}]
NARROW = {"init": "random", "num_layers": 2, "num_attention_heads": 1}  # half the small teacher's width
STEPS = 4


def trained(folder: Path, wan: Path, name: str, ranks: int, **more: Any) -> Path:
    usual = {"student_config": NARROW, "objective": SUM, "max_steps": STEPS}
    return train(folder, wan, name, ranks=ranks, **usual | more)


@pytest.fixture(scope="module")
def reference(folder: Path, wan2: Path) -> Path:
    return trained(folder, wan2, "zero2_1", 1, save_every=2)


CONSISTENCY = {"name": "consistency", "intervals": 8, "edges": 2}


FEW = {"objective": CONSISTENCY, "student_config": NARROW | {"experts": "two"}, "shift": 7.0}


@pytest.fixture(scope="module")
def few(folder: Path, wan2: Path) -> Path:
    """A student of two experts for two steps: 1 and 7/8, which is the boundary."""
    return trained(folder, wan2, "consistency_1", 1, max_steps=2, sample_prompts=[], **FEW)


def by_stock(run: Path, noise: Tensor) -> tuple[WanPipeline, Tensor, Tensor]:
    """The exported student, text_BLD of a prompt, and the latents that diffusers samples in two steps."""
    pipe = WanPipeline.from_pretrained(run / "student", dtype=torch.float32)
    no_guidance = {"do_classifier_free_guidance": False, "max_sequence_length": 512}
    text_BLD, _ = pipe.encode_prompt(["a red circle"], **no_guidance)
    size = {"height": 32, "width": 32, "num_frames": 1, "guidance_scale": 1.0, "output_type": "latent"}
    torch.manual_seed(5)
    stock = pipe(prompt_embeds=text_BLD, latents=noise, num_inference_steps=2, **size).frames
    return pipe, text_BLD, stock


@pytest.mark.slow
@torch.no_grad()
def test_stock_diffusers_samples_a_student_of_few_steps_as_it_was_trained(few: Path) -> None:
    noise = keyed_normal((1, 16, 1, 4, 4), "start")
    pipe, text_BLD, stock = by_stock(few, noise)
    trained_for = few_steps(7.0, 2, 0.875)
    assert pipe.scheduler.sigmas.tolist() == [*trained_for.sigmas, 0]
    networks = {Expert.HIGH_NOISE: pipe.transformer, Expert.LOW_NOISE: pipe.transformer_2}
    x_BCFHW = noise
    for expert, (sigma, following) in zip(Expert, pairwise([*trained_for.sigmas, 0]), strict=True):
        v_BCFHW = transformer.velocity(networks[expert], state(x_BCFHW, torch.tensor([sigma]), text_BLD))
        x_BCFHW = x_BCFHW + (following - sigma) * v_BCFHW
    assert torch.dist(stock, x_BCFHW) < 1e-3 * x_BCFHW.norm()
    given = open_wan(str(few / "student")), 7.0, noise, Conditioning(text_BLD), 40, trained_for
    ours, _ = denoise(LocalTeacher({e: network_of(m) for e, m in networks.items()}).velocity, *given)
    assert torch.dist(stock, ours) < 1e-5 * ours.norm()


@pytest.mark.slow
@torch.no_grad()
def test_stock_diffusers_renoises_a_student_that_is_trained_so(folder: Path, wan2: Path) -> None:
    objective = {"name": "consistency", "intervals": 8, "steps": 2}
    output = trained(folder, wan2, "renoise", 1, objective=objective, student_config=NARROW)
    noise = keyed_normal((1, 16, 1, 4, 4), "start")
    pipe, text_BLD, stock = by_stock(output, noise)
    torch.manual_seed(5)
    new_noise = torch.randn(noise.shape)
    teacher = LocalTeacher({Expert.HIGH_NOISE: network_of(pipe.transformer)})
    shift = open_wan(str(wan2)).shift
    few = few_steps(shift, 2, None, "renoise")
    x1_BCFHW = noise - transformer.velocity(pipe.transformer, state(noise, torch.ones(1), text_BLD))
    x_BCFHW = (1 - few.sigmas[1]) * x1_BCFHW + few.sigmas[1] * new_noise
    sigma_B = torch.tensor(few.sigmas[1:])
    x0_BCFHW = x_BCFHW - few.sigmas[1] * transformer.velocity(
        pipe.transformer, state(x_BCFHW, sigma_B, text_BLD)
    )
    assert torch.dist(stock, x0_BCFHW) < 1e-3 * x0_BCFHW.norm()
    folder_of_student = open_wan(str(output / "student"))
    ours, _ = denoise(
        teacher.velocity,
        folder_of_student,
        shift,
        noise,
        Conditioning(text_BLD),
        40,
        few,
        lambda _: new_noise,
    )
    assert torch.dist(stock, ours) < 1e-3 * ours.norm()
    card = " ".join((output / "student" / "README.md").read_text().split())
    assert "by noising its clean latents again (LCM)" in card and "torch.manual_seed" in card


def test_a_student_of_few_steps_says_how_to_sample_it_and_sample_does(few: Path, tmp_path: Path) -> None:
    card = " ".join((few / "student" / "README.md").read_text().split())
    assert "2 steps, by Euler's method from the noise levels 1, 0.8" in card
    assert "num_inference_steps=2" in card and "sigma) from 0.93" in card
    sampled = ["sample", "--model", few / "student", "--prompts", "a red circle", "--output"]
    size = ["--height", "32", "--width", "32"]
    for name, steps in {"usual": [], "two": ["--steps", "2"]}.items():
        wandistiller(*sampled, tmp_path / name, *size, *steps)
    usual, two = ((tmp_path / name / "0000.png").read_bytes() for name in ("usual", "two"))
    assert usual == two


def test_an_objective_that_trains_other_networks_than_a_checkpoint_has_is_refused(
    folder: Path, wan2: Path, few: Path
) -> None:
    more = FEW | {"objective": {"name": "dmd2", "steps": 2, "expert": "low_noise"}}
    file = recipe_file(folder, wan2, "consistency_1", **more)
    words = ["train", "--recipe", file, "--allow_changed", "objective", "scheduler", "optimizer"]
    done = wandistiller(*words, code=2)
    assert "holds no network `critic/transformer_2`, which dmd2" in done.stderr


def test_a_student_of_few_steps_has_the_levels_of_other_numbers_too(few: Path) -> None:
    pipe, trained_for = WanPipeline.from_pretrained(few / "student"), Facts.read(few / "student" / FACTS)
    levels = {n: sampler(open_wan(str(few / "student")), trained_for, n) for n in (1, 2, 4)}
    assert levels == {n: few_steps(7.0, n, trained_for.boundary, trained_for.sampler) for n in levels}
    pipe.scheduler.set_timesteps(2)
    assert pipe.scheduler.sigmas.tolist() == [*levels[2].sigmas, 0.0]
    assert pipe.config.boundary_ratio == levels[2].boundary


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_projections(folder: Path, wan2: Path, reference: Path) -> None:
    output = trained(folder, wan2, "resumed", 1, resume=str(reference / "checkpoints" / "step_00000002"))
    assert losses(output) == losses(reference)[2:]


@pytest.mark.slow
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
    wandistiller("prepare", "--recipe", recipe_file(folder, wan, "prepared", objective="trajectory"))
    (file,) = (wan / "transformer").glob("*.safetensors")
    content, ends = bytearray(file.read_bytes()), 1 << 20  # by which a cache knows its teacher
    assert len(content) > 4 * ends
    content[ends:-ends] = b"\xff" * (len(content) - 2 * ends)
    file.write_bytes(content)
    return wan


@pytest.mark.slow
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
