"""Traps of Wan: one time per token, two experts that are one, sigma against steps, missing libraries."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from drawing import GPU
from networks import network_of
from PIL import Image
from ranks import edit_json
from small_wan import FORMS, make_wan
from states import state

from wandistiller.batch import Batch, Conditioning
from wandistiller.data.dataset import PromptItem
from wandistiller.evaluation.candidates import read_candidate
from wandistiller.evaluation.draw_samples import sample
from wandistiller.evaluation.sampling import Sampling
from wandistiller.experts import Expert
from wandistiller.flow import FlowSchedule
from wandistiller.network.sampling import denoise, few_steps
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import transformer
from wandistiller.wan.pipeline import open_wan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Wan2.2 TI2V-5B, untrained."""
    return make_wan(tmp_path_factory.mktemp("five"), **FORMS["Wan2.2-TI2V-5B"])


@pytest.fixture(scope="module")
def pipe(five: Path) -> WanPipeline:
    return WanPipeline.from_pretrained(five, dtype=torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@torch.no_grad()
def test_one_time_per_sample_gives_the_velocity_of_one_time_per_token(
    five: Path, dtype: torch.dtype, tolerance: float
) -> None:
    model = WanTransformer3DModel.from_pretrained(five / "transformer", dtype=dtype).eval()
    x_t, text = keyed_normal((2, 48, 2, 4, 6), "x"), keyed_normal((2, 512, 32), "text")
    sigma_B = torch.tensor([0.3, 0.9])
    # as in the stock pipeline: frames x half height x half width
    time_BS = (1000 * sigma_B)[:, None].expand(2, 2 * 2 * 3)
    per_token = model(x_t.to(dtype), time_BS, text.to(dtype)).sample.float()
    per_sample = transformer.velocity(model, state(x_t, sigma_B, text))
    torch.testing.assert_close(per_sample, per_token, rtol=0, atol=tolerance)


@torch.no_grad()
def test_denoise_makes_the_stock_pipeline_s_latents_and_the_vae_its_pixels(
    five: Path, pipe: WanPipeline
) -> None:
    folder = open_wan(str(five))
    noise = torch.stack([keyed_normal((48, 2, 2, 4), "start", i) for i in range(2)])
    prompts = ["a red circle", "a blue square"]
    text_BLD, null_BLD = pipe.encode_prompt(prompts, ["", ""], max_sequence_length=512)
    given = {"prompt_embeds": text_BLD, "negative_prompt_embeds": null_BLD, "latents": noise}
    given |= {"height": 32, "width": 64, "num_frames": 5, "guidance_scale": 5.0, "num_inference_steps": 4}
    stock, pixels_BFCHW = (pipe(output_type=kind, **given).frames for kind in ("latent", "pt"))
    teacher = LocalTeacher(dict.fromkeys(Expert, network_of(pipe.transformer)))
    guided = GuidedTeacher(teacher, Guidance(null_BLD[0], dict.fromkeys(Expert, 5.0)))
    x0_BCFHW, _ = denoise(guided.velocity, folder, folder.shift, noise, Conditioning(text_BLD), 4)
    torch.testing.assert_close(x0_BCFHW, stock, rtol=0, atol=2e-5)
    decoded = folder.load_vae(CPU).decode(stock)
    torch.testing.assert_close(decoded, pixels_BFCHW.transpose(1, 2), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_vae_of_48_channels_encodes_to_normalised_latents(five: Path, pipe: WanPipeline) -> None:
    pixels = keyed_normal((1, 3, 5, 32, 64), "pixels").clamp(-1, 1)
    mean, std = (torch.linspace(*ends, 48).view(48, 1, 1, 1) for ends in ((-1, 1), (0.5, 2)))
    expected = (pipe.vae.encode(pixels).latent_dist.mode() - mean) / std
    torch.testing.assert_close(open_wan(str(five)).load_vae(CPU).encode(pixels), expected, rtol=0, atol=1e-6)


def drawn(folder: Path, output: Path, **settings: float) -> np.ndarray:
    sampling = Sampling(height=32, width=32, steps=2, **settings)
    files = sample(read_candidate(str(folder)), [PromptItem("a red circle")], output, sampling, 0, GPU)
    return np.asarray(Image.open(files[0]))


# That such a folder has one expert is in test_transformer.py.
@pytest.mark.usefixtures("one_rank")
def test_a_converted_wan_with_a_boundary_but_one_transformer_is_sampled_with_that_one(
    wan1: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    converted = copy_of(wan1, weights=True)
    edit_json(converted / "model_index.json", boundary_ratio=0.875)
    assert np.array_equal(drawn(converted, tmp_path / "converted"), drawn(wan1, tmp_path / "plain"))


# test_flow.py has the draws themselves.
@pytest.mark.parametrize(("shift", "share"), [(1, 0.125), (3, 0.3), (5, 0.417), (8, 0.533), (12, 0.632)])
def test_the_high_noise_expert_s_share_follows_from_the_shift(wan2: Path, shift: int, share: float) -> None:
    schedule = FlowSchedule(shift, open_wan(str(wan2)).boundary, 0)
    assert schedule.high_noise_share() == pytest.approx(share, abs=5e-4)


# A student of few steps has a scheduler of its own, below.
def test_four_steps_of_the_stock_scheduler_predict_at_these_sigmas(wan1: Path) -> None:
    noise, text_BLD = keyed_normal((1, 16, 1, 4, 4), "x"), torch.zeros(1, 512, 32)
    sigmas = []

    def velocity(batch: Batch) -> torch.Tensor:
        sigmas.append(round(batch.sigma_B.item(), 6))
        return batch.x_t_BCFHW

    _, path = denoise(velocity, open_wan(str(wan1)), 5.0, noise, Conditioning(text_BLD), 4)
    # whole timesteps; the steps themselves are between exact sigmas
    assert sigmas == [0.999, 0.937, 0.833, 0.625]
    assert [sigma for sigma, _ in path] == pytest.approx([1.0, 0.9376, 0.8336, 0.6259], abs=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
def test_the_scheduler_of_few_steps_has_the_levels_of_the_shifted_line(shift: float, steps: int) -> None:
    levels = few_steps(shift, steps, None).sigmas
    line = FlowSchedule(shift, None, 0).steps(steps)
    assert levels == pytest.approx(line, abs=0.002) and levels[0] == 1 and len(levels) == steps
    trained = FlowSchedule(shift, None, 0, few=few_steps(shift, steps, None))
    assert trained.steps(steps) == list(levels) and trained.steps(steps + 1) != list(levels)


@pytest.mark.parametrize(("shift", "boundary"), [(7.0, (0.9545 + 0.875) / 2), (5.0, (0.9375 + 0.8333) / 2)])
def test_the_boundary_of_few_steps_lies_between_two_levels_and_one_at_it_is_the_low_noise_expert_s(
    shift: float, boundary: float
) -> None:
    """At shift 7 the third of four levels is the boundary 0.875 itself, which rounding moves to 0.8752."""
    few = few_steps(shift, 4, 0.875)
    assert few.boundary == pytest.approx(boundary, abs=0.001)
    assert few_steps(1.0, 2, 0.4).boundary == 0.4  # all are the high-noise expert's


def test_a_video_without_its_library_is_refused_before_it_is_made(
    wan1: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="pip install av"):
        drawn(wan1, tmp_path / "out", num_frames=5)
    assert not (tmp_path / "out").exists()
