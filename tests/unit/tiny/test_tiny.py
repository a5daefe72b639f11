"""The embedded teacher: a real Wan2.2-A14B in miniature that stock diffusers opens and samples."""

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors import safe_open
from transformers import AutoTokenizer, T5TokenizerFast

import wandistiller
from wandistiller.tiny import shapes
from wandistiller.tiny.make import chosen, megabytes, open_pipeline, sample
from wandistiller.tiny.make_experts import EXPERT_CONFIG, one_pad_row
from wandistiller.tiny.make_vae import vae_psnr
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT

TINY = Path(next(iter(wandistiller.__path__))) / "tiny" / "pipeline"
STEPS = 20
GUIDANCE = (2.0, 2.0)
CLEANED = WAN_NEGATIVE_PROMPT.replace("，", ",")
"""What ftfy makes of it."""
EACH = 10
ASKED = chosen(shapes.seen_prompts(), EACH) + chosen(shapes.held_out_prompts(), EACH)


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return open_pipeline(TINY)


@pytest.fixture(scope="module")
def guided_BCHW(pipeline: WanPipeline) -> torch.Tensor:
    return sample(pipeline, ASKED, steps=STEPS, guidance=GUIDANCE)


@pytest.fixture(scope="module")
def unguided_BCHW(pipeline: WanPipeline) -> torch.Tensor:
    return sample(pipeline, ASKED, steps=STEPS, guidance=(1.0, 1.0))


def test_stock_pipeline_opens_the_folder_with_two_experts(pipeline: WanPipeline) -> None:
    assert (
        type(pipeline.transformer).__name__
        == type(pipeline.transformer_2).__name__
        == "WanTransformer3DModel"
    )
    assert type(pipeline.text_encoder).__name__ == "UMT5EncoderModel"


def test_pipeline_fields_are_those_of_a14b(pipeline: WanPipeline) -> None:
    assert pipeline.config.boundary_ratio == 0.875
    assert pipeline.config.expand_timesteps is False
    assert pipeline.scheduler.config.prediction_type == "flow_prediction"


def test_whole_folder_is_below_24_megabytes() -> None:
    assert megabytes(TINY) < 24


def test_all_weights_are_bfloat16() -> None:
    for file in TINY.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}
        assert dtypes == {"BF16"}, file


def test_experts_differ(pipeline: WanPipeline) -> None:
    high, low = pipeline.transformer.state_dict(), pipeline.transformer_2.state_dict()
    assert all(not torch.equal(high[name], low[name]) for name in high if name.endswith("to_q.weight"))


@pytest.mark.parametrize("tokenizer_class", [AutoTokenizer, T5TokenizerFast])
def test_tokenizer_gives_back_a_prompt(tokenizer_class: type) -> None:
    tokenizer = tokenizer_class.from_pretrained(TINY / "tokenizer")
    for prompt in ASKED:
        assert tokenizer.decode(tokenizer(prompt).input_ids, skip_special_tokens=True) == prompt


def test_tokenizer_pads_and_ends_like_t5(pipeline: WanPipeline) -> None:
    ids = pipeline.tokenizer(["", ASKED[0]], padding=True).input_ids
    assert ids[0] == [1] + [0] * (len(ids[1]) - 1)
    assert ids[1][-1] == 1


@torch.no_grad()
def test_official_negative_prompt_means_the_same_with_and_without_ftfy(pipeline: WanPipeline) -> None:
    raw, cleaned = (
        pipeline.tokenizer(text, return_tensors="pt").input_ids for text in (WAN_NEGATIVE_PROMPT, CLEANED)
    )
    assert raw.shape == cleaned.shape == (1, 8)
    assert torch.equal(pipeline.text_encoder(raw)[0], pipeline.text_encoder(cleaned)[0])


@pytest.mark.slow
def test_official_negative_prompt_guides_as_well(pipeline: WanPipeline) -> None:
    asked = ASKED[:8]
    image_BCHW = sample(pipeline, asked, steps=10, guidance=GUIDANCE, negative_prompt=WAN_NEGATIVE_PROMPT)
    assert sum(shapes.fully_right(image_BCHW, asked)) >= 7


def test_vae_gives_back_held_out_pictures_at_28_db(pipeline: WanPipeline) -> None:
    assert vae_psnr(pipeline.vae, shapes.held_out_prompts(), seed=10_000) >= 28


@torch.no_grad()
def test_vae_gives_back_a_still_video_as_five_equal_frames(pipeline: WanPipeline) -> None:
    frame_BCFHW = shapes.render(ASKED[0])[None, :, None] * 2 - 1
    video_BCFHW = frame_BCFHW.expand(-1, -1, 5, -1, -1)
    decoded_BCFHW = pipeline.vae.decode(pipeline.vae.encode(video_BCFHW).latent_dist.mode()).sample
    assert decoded_BCFHW.shape == video_BCFHW.shape
    torch.testing.assert_close(
        decoded_BCFHW, decoded_BCFHW[:, :, :1].expand_as(decoded_BCFHW), atol=1e-4, rtol=0
    )


def test_guided_pictures_of_seen_prompts_are_right(guided_BCHW: torch.Tensor) -> None:
    right = shapes.fully_right(guided_BCHW[:EACH], ASKED[:EACH])
    assert sum(right) >= 0.9 * len(right)


def test_guided_pictures_of_held_out_prompts_are_right(guided_BCHW: torch.Tensor) -> None:
    right = shapes.fully_right(guided_BCHW[EACH:], ASKED[EACH:])
    assert sum(right) >= 0.9 * len(right)


def test_guidance_draws_closer_to_what_was_asked(
    guided_BCHW: torch.Tensor, unguided_BCHW: torch.Tensor
) -> None:
    guided, unguided = (
        shapes.mse_to_prompts(image_BCHW, ASKED).mean() for image_BCHW in (guided_BCHW, unguided_BCHW)
    )
    assert guided < unguided


@torch.no_grad()
def test_training_shortcut_gives_the_numbers_of_512_text_rows(pipeline: WanPipeline) -> None:
    rng = torch.Generator().manual_seed(0)
    latent_BCFHW = torch.randn(3, 16, 1, 8, 8, generator=rng)
    text_BLD = torch.randn(3, 14, EXPERT_CONFIG["text_dim"], generator=rng)
    text_BLD[0, 10:], text_BLD[:, 13:] = 0, 0
    padded_BLD = torch.nn.functional.pad(text_BLD, (0, 0, 0, 512 - 14))
    model, timestep_B = pipeline.transformer, torch.tensor([900.0, 950.0, 999.0])
    stock_BCFHW = model(latent_BCFHW, timestep_B, padded_BLD).sample
    with one_pad_row(model):
        short_BCFHW = model(latent_BCFHW, timestep_B, text_BLD).sample
    torch.testing.assert_close(short_BCFHW, stock_BCFHW, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        model(latent_BCFHW, timestep_B, padded_BLD).sample, stock_BCFHW, atol=0, rtol=0
    )


def test_one_scene_in_ten_is_held_out() -> None:
    seen, held_out = set(shapes.seen_prompts()), set(shapes.held_out_prompts())
    assert (len(seen), len(held_out), len(seen & held_out)) == (1008, 112, 0)


def test_every_attribute_of_held_out_scenes_is_seen() -> None:
    for attribute, names in shapes.ATTRIBUTES.items():
        assert {getattr(shapes.SPECS[prompt], attribute) for prompt in shapes.seen_prompts()} == set(names)


def test_every_canonical_picture_is_its_own_nearest_candidate() -> None:
    assert all(shapes.fully_right(shapes.canonical_images(), list(shapes.SPECS)))


def test_every_jittered_picture_is_judged_right() -> None:
    prompts = list(shapes.SPECS)
    assert all(shapes.fully_right(torch.stack([shapes.render(prompt, 7) for prompt in prompts]), prompts))


def test_jitter_depends_on_the_seed_alone() -> None:
    first, again, other = (shapes.render(ASKED[0], seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
