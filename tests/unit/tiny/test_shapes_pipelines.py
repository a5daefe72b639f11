"""The embedded teachers: real Wan2.2-A14Bs in miniature that stock diffusers opens and samples."""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, T5TokenizerFast

from wandistiller.tiny import clips, first_frames, shapes, video_scores
from wandistiller.tiny.making.scores import VAE_SEED, chosen, megabytes, open_pipeline, sample
from wandistiller.tiny.making.vae import decoded, encoded, vae_psnr
from wandistiller.tiny.making.worlds import WORLDS
from wandistiller.wan.defaults import WAN_NEGATIVE_PROMPT

IMAGE, VIDEO = WORLDS["image"], WORLDS["video"]
GUIDANCE, EACH = (2.0, 2.0), 10
PICTURES = chosen(shapes.SEEN, EACH) + chosen(shapes.HELD_OUT, EACH)
CLIPS = chosen(clips.SEEN, EACH) + chosen(clips.HELD_OUT, EACH)
BOTH_HALVES = pytest.mark.parametrize("part", [slice(EACH), slice(EACH, None)], ids=["seen", "held out"])

pipeline = cache(open_pipeline)


class Form(NamedTuple):
    kind: type
    boundary: float
    in_channels: int
    megabytes: int


FORMS = {
    "image": Form(WanPipeline, 0.875, 16, 24),
    "video": Form(WanPipeline, 0.875, 16, 14),
    "first_frame": Form(WanImageToVideoPipeline, 0.9, 36, 14),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_embedded_teacher_is_a_small_pipeline_of_two_experts_in_bfloat16(name: str) -> None:
    form, folder = FORMS[name], WORLDS[name].pipeline
    assert megabytes(folder) < form.megabytes
    pipe = pipeline(folder)
    parts = (pipe.transformer, pipe.transformer_2, pipe.text_encoder, pipe.vae)
    names = [type(part).__name__ for part in parts]
    assert names == ["WanTransformer3DModel", "WanTransformer3DModel", "UMT5EncoderModel", "AutoencoderKLWan"]
    assert type(pipe) is form.kind and pipe.transformer.config.in_channels == form.in_channels
    assert (pipe.config.boundary_ratio, pipe.config.expand_timesteps) == (form.boundary, False)
    assert pipe.scheduler.config.prediction_type == "flow_prediction"
    high, low = pipe.transformer.state_dict(), pipe.transformer_2.state_dict()
    assert all(not torch.equal(high[name], low[name]) for name in high if name.endswith("to_q.weight"))
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}, file


@pytest.mark.parametrize("tokenizer_class", [AutoTokenizer, T5TokenizerFast])
def test_the_tokenizer_decodes_what_it_encodes(tokenizer_class: type) -> None:
    tokenizer = tokenizer_class.from_pretrained(IMAGE.pipeline / "tokenizer")
    for prompt in PICTURES:
        assert tokenizer.decode(tokenizer(prompt).input_ids, skip_special_tokens=True) == prompt


def test_tokenizer_pads_and_ends_like_t5() -> None:
    ids = pipeline(IMAGE.pipeline).tokenizer(["", PICTURES[0]], padding=True).input_ids
    assert ids[0] == [1] + [0] * (len(ids[1]) - 1)
    assert ids[1][-1] == 1


@torch.no_grad()
def test_official_negative_prompt_means_the_same_with_and_without_ftfy() -> None:
    pipe = pipeline(IMAGE.pipeline)
    texts = (WAN_NEGATIVE_PROMPT, WAN_NEGATIVE_PROMPT.replace("，", ","))  # ftfy's output
    raw, cleaned = (pipe.tokenizer(text, return_tensors="pt").input_ids for text in texts)
    assert raw.shape == cleaned.shape == (1, 8)
    assert torch.equal(pipe.text_encoder(raw)[0], pipe.text_encoder(cleaned)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed", "db"), [("image", 10_000, 28), ("video", VAE_SEED, 25)])
def test_the_vae_reproduces_held_out_scenes(name: str, seed: int, db: int) -> None:
    assert vae_psnr(pipeline(WORLDS[name].pipeline).vae, WORLDS[name], seed=seed) >= db


@torch.no_grad()
def test_the_vae_reproduces_a_still_video_as_five_equal_frames() -> None:
    vae = pipeline(IMAGE.pipeline).vae
    video_BCFHW = (shapes.render(PICTURES[0])[None, :, None] * 2 - 1).expand(-1, -1, 5, -1, -1)
    decoded_BCFHW = vae.decode(vae.encode(video_BCFHW).latent_dist.mode()).sample
    assert decoded_BCFHW.shape == video_BCFHW.shape
    first_BCFHW = decoded_BCFHW[:, :, :1].expand_as(decoded_BCFHW)
    torch.testing.assert_close(decoded_BCFHW, first_BCFHW, atol=1e-4, rtol=0)


@torch.no_grad()
def test_what_the_vae_is_trained_to_decode_is_what_diffusers_decodes() -> None:
    vae = pipeline(VIDEO.pipeline).vae
    z_BCFHW = encoded(vae, VIDEO, [(0, 0), (100, 1)])
    assert torch.equal(decoded(vae, z_BCFHW).clamp(-1, 1), vae.decode(z_BCFHW).sample)


@pytest.mark.slow
@torch.no_grad()
def test_held_out_clips_are_judged_right_after_the_vae() -> None:
    prompts, vae = CLIPS[EACH:], pipeline(VIDEO.pipeline).vae
    clip_BCFHW = torch.stack([clips.render(prompt, VAE_SEED) for prompt in prompts])
    z_BCFHW = vae.encode(clip_BCFHW * 2 - 1).latent_dist.mode()
    assert z_BCFHW.shape == (EACH, 16, 3, 6, 6)
    seen_BCFHW = (vae.decode(z_BCFHW).sample + 1) / 2
    assert all(video_scores.fully_right(seen_BCFHW, prompts))
    assert abs(video_scores.speeds(seen_BCFHW, prompts).nanmean() - 1) < 0.05


@cache
def drawn(name: str, guidance: tuple[float, float] = GUIDANCE) -> Tensor:
    """Pictures or clips of all prompts in 20 steps."""
    prompts = PICTURES if name == "image" else CLIPS
    sampled = sample(WORLDS[name], pipeline(WORLDS[name].pipeline), prompts, steps=20, guidance=guidance)
    return sampled[:, :, 0] if name == "image" else sampled


@pytest.mark.slow
@BOTH_HALVES
def test_guided_pictures_are_right(part: slice) -> None:
    assert sum(shapes.fully_right(drawn("image")[part], PICTURES[part])) >= 0.9 * EACH


@pytest.mark.slow
@BOTH_HALVES
def test_guided_clips_are_right_and_as_fast_as_asked(part: slice) -> None:
    assert sum(video_scores.fully_right(drawn("video")[part], CLIPS[part])) >= 0.9 * EACH
    assert abs(video_scores.speeds(drawn("video")[part], CLIPS[part]).nanmean() - 1) < 0.1


@pytest.mark.slow
def test_seven_of_eight_held_out_clips_from_given_frames_are_fully_right() -> None:
    world, names = WORLDS["first_frame"], chosen(first_frames.HELD_OUT, 8)
    clip_BCFHW = sample(world, pipeline(world.pipeline), names, steps=20, guidance=(2.0, 2.0))
    assert sum(video_scores.fully_right(clip_BCFHW, names, begins=True)) >= 7
