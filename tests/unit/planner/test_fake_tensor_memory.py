"""Memory of VAE and text encoder by FakeTensor, against sums by hand, real tensors and whole videos."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published_wan import VAE21 as WAN21
from small_wan import VAE21, VAE22
from torch import nn

from wandistiller.planner.fake_tensor_memory import ON_CPU, decoding, encoding, shortened, text_encoding
from wandistiller.utils.files import read_json
from wandistiller.wan.activation_memory import Live
from wandistiller.wan.components import UMT5_XXL, text_encoder_of, vae_of
from wandistiller.wan.encoders import decoded, encoded
from wandistiller.wan.pipeline import TINY

MIB = 2**20


# What is counted


def test_a_tensor_counts_until_nothing_holds_it() -> None:
    with Live() as seen:
        a = torch.zeros(MIB)
        b = a + 1
        del a
        c = b * 2
    assert (seen.now, seen.most) == (8 * MIB, 8 * MIB)
    del b, c
    assert seen.now == 0


def test_views_and_what_was_there_before_count_nothing() -> None:
    weight = torch.zeros(8, 4)
    with Live() as seen:
        views = weight.t(), weight.view(4, 8)[1:], weight.add_(1)
    assert seen.most == 0 and len(views) == 3


def test_on_a_cpu_a_margin_comes_on_top_of_the_tensors() -> None:
    gpu, cpu = (
        decoding(WAN21, (1, 16, 1, 60, 104), accelerator=accelerator) for accelerator in (True, False)
    )
    assert cpu == (gpu.weights, int(ON_CPU * gpu.work))


# Against real tensors


def really(vae: dict[str, Any], shape: tuple[int, ...], decode: bool) -> int:
    """The most that real tensors took on this CPU, the whole video run."""
    model = vae_of(vae)
    with torch.no_grad(), Live() as seen:
        (decoded if decode else encoded)(model, torch.zeros(shape))
    return seen.most


TEACHER = read_json(TINY / "vae" / "config.json")
VAES = {"tiny": (TEACHER, 8), "Wan2.1": (VAE21, 8), "Wan2.2": (VAE22, 16)}


@pytest.mark.parametrize("frames", [1, 21])
@pytest.mark.parametrize("name", VAES)
def test_what_is_said_of_a_vae_is_what_real_tensors_of_the_whole_video_take(name: str, frames: int) -> None:
    vae, spatial = VAES[name]
    pixels = (2, 3, frames, 32, 48)
    latents = (1, vae["z_dim"], (frames - 1) // 4 + 1, 32 // spatial, 48 // spatial)
    assert encoding(vae, pixels, accelerator=True).work == really(vae, pixels, decode=False)
    assert decoding(vae, latents, accelerator=True).work == really(vae, latents, decode=True)


def test_what_is_said_of_a_text_encoder_is_what_real_tensors_take(wan1: Path) -> None:
    config = json.loads((wan1 / "text_encoder" / "config.json").read_text())
    model, token_BL = text_encoder_of(config), torch.zeros(1, 512, dtype=torch.long)
    mask_BL = (torch.arange(512) < 7).long()[None]  # with padding, as all prompts have
    with torch.no_grad(), Live() as seen:
        model(token_BL, mask_BL)
    tokens = token_BL.nbytes + mask_BL.nbytes
    assert text_encoding(config, torch.float32, accelerator=True).work - tokens == pytest.approx(
        seen.most, abs=tokens
    )


# Wan's own


def test_of_a_long_video_only_four_chunks_are_run() -> None:
    ran = []

    class Chunk(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ran.append(int(x[0]))
            return x[:1]

    chunk = Chunk()
    with shortened(chunk, 9):
        shapes = [chunk.forward(torch.full((2,), i)).shape for i in range(9)]
    assert ran == [0, 1, 2, 8] and set(shapes) == {(1,)}
    assert chunk.forward(torch.ones(2)).shape == (1,) and len(ran) == 5


def test_decoding_81_frames_of_480_by_832_takes_7_6_gib() -> None:
    need = decoding(WAN21, (1, 16, 21, 60, 104), accelerator=True)
    out = 4 * 3 * 81 * 480 * 832
    assert need.weights == pytest.approx(4 * 126.9e6, rel=1e-3)
    assert need.work == pytest.approx(7796 * MIB, rel=1e-3) and need.work > 10 * out


def test_umt5_xxl_has_5_7_billion_parameters_and_little_else() -> None:
    need = text_encoding(UMT5_XXL, torch.bfloat16, accelerator=True)
    assert need.weights == pytest.approx(2 * 5.68e9, rel=1e-3) and need.work < 0.02 * need.weights
