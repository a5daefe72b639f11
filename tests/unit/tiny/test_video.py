"""The embedded video teacher: a real Wan2.2-A14B in miniature that stock diffusers opens and samples."""

import pytest
import torch
from diffusers import WanPipeline
from safetensors import safe_open

from wandistiller.tiny import clips, video_scores
from wandistiller.tiny.making.scores import VAE_SEED, chosen, megabytes, open_pipeline, sample
from wandistiller.tiny.making.vae import decoded, encoded, vae_psnr
from wandistiller.tiny.making.worlds import WORLDS

WORLD = WORLDS["video"]
FOLDER = WORLD.pipeline
STEPS = 20
EACH = 10
PROMPTS = chosen(clips.SEEN, EACH) + chosen(clips.HELD_OUT, EACH)


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return open_pipeline(FOLDER)


@pytest.fixture(scope="module")
def guided_BCFHW(pipeline: WanPipeline) -> torch.Tensor:
    return sample(WORLD, pipeline, PROMPTS, steps=STEPS, guidance=(2.0, 2.0))


def test_the_stock_pipeline_has_the_classes_and_fields_of_a14b(pipeline: WanPipeline) -> None:
    parts = (pipeline.transformer, pipeline.transformer_2, pipeline.text_encoder, pipeline.vae)
    names = [type(part).__name__ for part in parts]
    assert names == ["WanTransformer3DModel", "WanTransformer3DModel", "UMT5EncoderModel", "AutoencoderKLWan"]
    assert (pipeline.config.boundary_ratio, pipeline.config.expand_timesteps) == (0.875, False)
    assert pipeline.scheduler.config.prediction_type == "flow_prediction"
    assert (pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial) == (4, 8)


def test_whole_folder_is_below_14_megabytes() -> None:
    assert megabytes(FOLDER) < 14


def test_all_weights_are_bfloat16() -> None:
    for file in FOLDER.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}
        assert dtypes == {"BF16"}, file


def test_experts_differ(pipeline: WanPipeline) -> None:
    high, low = pipeline.transformer.state_dict(), pipeline.transformer_2.state_dict()
    assert all(not torch.equal(high[name], low[name]) for name in high if name.endswith("to_q.weight"))


@pytest.mark.slow
def test_the_vae_reproduces_held_out_clips_at_25_db(pipeline: WanPipeline) -> None:
    assert vae_psnr(pipeline.vae, WORLD, seed=VAE_SEED) >= 25


@torch.no_grad()
def test_what_the_vae_is_trained_to_decode_is_what_diffusers_decodes(pipeline: WanPipeline) -> None:
    z_BCFHW = encoded(pipeline.vae, WORLD, [(0, 0), (100, 1)])
    assert torch.equal(decoded(pipeline.vae, z_BCFHW).clamp(-1, 1), pipeline.vae.decode(z_BCFHW).sample)


@torch.no_grad()
def test_held_out_clips_are_judged_right_after_the_vae(pipeline: WanPipeline) -> None:
    prompts = PROMPTS[EACH:]
    clip_BCFHW = torch.stack([clips.render(prompt, VAE_SEED) for prompt in prompts])
    z_BCFHW = pipeline.vae.encode(clip_BCFHW * 2 - 1).latent_dist.mode()
    assert z_BCFHW.shape == (EACH, 16, 3, 6, 6)
    seen_BCFHW = (pipeline.vae.decode(z_BCFHW).sample + 1) / 2
    assert all(video_scores.fully_right(seen_BCFHW, prompts))
    speed_B = video_scores.speeds(seen_BCFHW, prompts)
    assert abs(speed_B.nanmean() - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("part", [slice(EACH), slice(EACH, None)], ids=["seen", "held out"])
def test_guided_clips_are_right_and_as_fast_as_asked(guided_BCFHW: torch.Tensor, part: slice) -> None:
    assert sum(video_scores.fully_right(guided_BCFHW[part], PROMPTS[part])) >= 0.9 * EACH
    assert abs(video_scores.speeds(guided_BCFHW[part], PROMPTS[part]).nanmean() - 1) < 0.1


@pytest.mark.slow
def test_guidance_draws_closer_to_the_prompts(pipeline: WanPipeline, guided_BCFHW: torch.Tensor) -> None:
    unguided_BCFHW = sample(WORLD, pipeline, PROMPTS, steps=STEPS, guidance=(1.0, 1.0))
    pair = (guided_BCFHW, unguided_BCFHW)
    guided, unguided = (video_scores.mse_to_prompts(clip_BCFHW, PROMPTS).mean() for clip_BCFHW in pair)
    assert guided < unguided
