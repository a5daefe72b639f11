"""The embedded teacher: a real Wan2.2-A14B in miniature that stock diffusers opens and samples."""

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors import safe_open
from transformers import AutoTokenizer, T5TokenizerFast

import wandistiller
from wandistiller.tiny import shapes
from wandistiller.tiny.making.scores import chosen, megabytes, open_pipeline, sample
from wandistiller.tiny.making.vae import vae_psnr
from wandistiller.tiny.making.worlds import WORLDS
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT

WORLD = WORLDS["image"]
TINY = Path(next(iter(wandistiller.__path__))) / "tiny" / "pipeline"
STEPS = 20
GUIDANCE = (2.0, 2.0)
EACH = 10
PROMPTS = chosen(shapes.SEEN, EACH) + chosen(shapes.HELD_OUT, EACH)


@pytest.fixture(scope="module")
def pipeline() -> WanPipeline:
    return open_pipeline(TINY)


@pytest.fixture(scope="module")
def guided_BCHW(pipeline: WanPipeline) -> torch.Tensor:
    return sample(WORLD, pipeline, PROMPTS, steps=STEPS, guidance=GUIDANCE)[:, :, 0]


def test_the_stock_pipeline_has_the_classes_and_fields_of_a14b(pipeline: WanPipeline) -> None:
    parts = (pipeline.transformer, pipeline.transformer_2, pipeline.text_encoder)
    names = [type(part).__name__ for part in parts]
    assert names == ["WanTransformer3DModel", "WanTransformer3DModel", "UMT5EncoderModel"]
    assert (pipeline.config.boundary_ratio, pipeline.config.expand_timesteps) == (0.875, False)
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
def test_the_tokenizer_decodes_what_it_encodes(tokenizer_class: type) -> None:
    tokenizer = tokenizer_class.from_pretrained(TINY / "tokenizer")
    for prompt in PROMPTS:
        assert tokenizer.decode(tokenizer(prompt).input_ids, skip_special_tokens=True) == prompt


def test_tokenizer_pads_and_ends_like_t5(pipeline: WanPipeline) -> None:
    ids = pipeline.tokenizer(["", PROMPTS[0]], padding=True).input_ids
    assert ids[0] == [1] + [0] * (len(ids[1]) - 1)
    assert ids[1][-1] == 1


@torch.no_grad()
def test_official_negative_prompt_means_the_same_with_and_without_ftfy(pipeline: WanPipeline) -> None:
    texts = (WAN_NEGATIVE_PROMPT, WAN_NEGATIVE_PROMPT.replace("，", ","))  # ftfy's output
    raw, cleaned = (pipeline.tokenizer(text, return_tensors="pt").input_ids for text in texts)
    assert raw.shape == cleaned.shape == (1, 8)
    assert torch.equal(pipeline.text_encoder(raw)[0], pipeline.text_encoder(cleaned)[0])


@pytest.mark.slow
def test_official_negative_prompt_guides_as_well(pipeline: WanPipeline) -> None:
    prompts = PROMPTS[:8]
    settings = {"steps": 10, "guidance": GUIDANCE, "negative_prompt": WAN_NEGATIVE_PROMPT}
    image_BCHW = sample(WORLD, pipeline, prompts, **settings)[:, :, 0]
    assert sum(shapes.fully_right(image_BCHW, prompts)) >= 7


@pytest.mark.slow
def test_the_vae_reproduces_held_out_pictures_at_28_db(pipeline: WanPipeline) -> None:
    assert vae_psnr(pipeline.vae, WORLD, seed=10_000) >= 28


@torch.no_grad()
def test_the_vae_reproduces_a_still_video_as_five_equal_frames(pipeline: WanPipeline) -> None:
    frame_BCFHW = shapes.render(PROMPTS[0])[None, :, None] * 2 - 1
    video_BCFHW = frame_BCFHW.expand(-1, -1, 5, -1, -1)
    decoded_BCFHW = pipeline.vae.decode(pipeline.vae.encode(video_BCFHW).latent_dist.mode()).sample
    assert decoded_BCFHW.shape == video_BCFHW.shape
    first_BCFHW = decoded_BCFHW[:, :, :1].expand_as(decoded_BCFHW)
    torch.testing.assert_close(decoded_BCFHW, first_BCFHW, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("part", [slice(EACH), slice(EACH, None)], ids=["seen", "held out"])
def test_guided_pictures_are_right(guided_BCHW: torch.Tensor, part: slice) -> None:
    assert sum(shapes.fully_right(guided_BCHW[part], PROMPTS[part])) >= 0.9 * EACH


@pytest.mark.slow
def test_guidance_draws_closer_to_the_prompts(pipeline: WanPipeline, guided_BCHW: torch.Tensor) -> None:
    unguided_BCHW = sample(WORLD, pipeline, PROMPTS, steps=STEPS, guidance=(1.0, 1.0))[:, :, 0]
    pair = (guided_BCHW, unguided_BCHW)
    guided, unguided = (shapes.mse_to_prompts(image_BCHW, PROMPTS).mean() for image_BCHW in pair)
    assert guided < unguided


def test_one_scene_in_ten_is_held_out() -> None:
    seen, held_out = set(shapes.SEEN), set(shapes.HELD_OUT)
    assert (len(seen), len(held_out), len(seen & held_out)) == (1008, 112, 0)


def test_every_attribute_of_held_out_scenes_is_seen() -> None:
    for attribute, names in shapes.ATTRIBUTES.items():
        assert {getattr(shapes.SPECS[prompt], attribute) for prompt in shapes.SEEN} == set(names)


def test_every_canonical_picture_is_its_own_nearest_candidate() -> None:
    assert all(shapes.fully_right(shapes.canonical_images(), list(shapes.SPECS)))


def test_every_jittered_picture_is_judged_right() -> None:
    image_BCHW = torch.stack([shapes.render(prompt, 7) for prompt in shapes.SPECS])
    assert all(shapes.fully_right(image_BCHW, list(shapes.SPECS)))


def test_jitter_depends_on_the_seed_alone() -> None:
    first, again, other = (shapes.render(PROMPTS[0], seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
