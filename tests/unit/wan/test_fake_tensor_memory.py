"""Memory of VAE and text encoder by FakeTensor, against sums by hand, real tensors and whole videos."""

from pathlib import Path

import pytest
import torch
from published_wan import VAE21 as WAN21
from published_wan import VAE22 as WAN22
from slow_cases import slow_but
from small_wan import VAE21, VAE22
from torch import nn

from wandistiller.network.activation_memory import Live
from wandistiller.utils.files import TINY, read_json
from wandistiller.wan.components import decoded, encoded, text_encoder_of, vae_of
from wandistiller.wan.fake_tensor_memory import ON_CPU, coding, shortened, text_encoding

MIB = 2**20


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


VAES = {
    "tiny": (read_json(TINY["tiny"] / "vae" / "config.json"), 8),
    "Wan2.1": (VAE21, 8),
    "Wan2.2": (VAE22, 16),
}


@pytest.mark.parametrize("frames", [1, 17])
@pytest.mark.parametrize("name", slow_but(["Wan2.1"], VAES))
def test_planned_memory_of_a_vae_is_that_of_real_tensors_of_the_whole_video(name: str, frames: int) -> None:
    vae, spatial = VAES[name]
    pixels = (1, 3, frames, 32, 32)
    latents = (1, vae["z_dim"], (frames - 1) // 4 + 1, 32 // spatial, 32 // spatial)
    for plan, call, shape in (("encode", encoded, pixels), ("decode", decoded, latents)):
        model = vae_of(vae)
        for on_gpu in (True, False):
            with torch.no_grad(), Live(cudnn=on_gpu) as measured:
                call(model, torch.zeros(shape))
            expected = measured.most if on_gpu else int(ON_CPU * measured.most)
            assert coding(plan, vae, shape, accelerator=on_gpu).work == expected


def test_cudnn_takes_a_convolution_s_tensors_again_while_it_runs() -> None:
    layer = nn.Conv3d(2, 4, 3)
    with torch.no_grad(), Live(cudnn=True) as seen:
        layer(torch.zeros(1, 2, 3, 6, 6))
    into, out, weights = 4 * 2 * 3 * 6 * 6, 4 * 4 * 4 * 4, 4 * 4 * 2 * 27
    assert seen.most == 2 * (into + out) + weights


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_planned_memory_of_a_text_encoder_is_that_of_real_tensors(wan1: Path, layers: int) -> None:
    config = read_json(wan1 / "text_encoder" / "config.json") | {"num_layers": layers}
    model, token_BL = text_encoder_of(config), torch.zeros(1, 512, dtype=torch.long)
    mask_BL = (torch.arange(512) < 7).long()[None]  # with padding, as all prompts have
    with torch.no_grad(), Live() as measured:
        model(token_BL, mask_BL)
    tokens = token_BL.nbytes + mask_BL.nbytes
    planned = text_encoding(config, "float32", accelerator=True)
    assert planned.work - tokens == pytest.approx(measured.most, abs=tokens)
    assert planned.weights == sum(p.nbytes for p in model.parameters())


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


MEASURED = {  # MiB on an H100, torch 2.11, 480x832, float32: python tests/gpu/measure.py coders
    "Wan2.1": {("encode", 1): 2063, ("decode", 1): 3225, ("encode", 81): 6925, ("decode", 81): 8973},
    "Wan2.2": {("encode", 1): 996, ("decode", 1): 2820, ("encode", 81): 3983, ("decode", 81): 9391},
}


@pytest.mark.parametrize("name", slow_but(["Wan2.1"], MEASURED))
def test_planned_memory_of_a_published_vae_is_what_a_gpu_measured_to_a_thousandth(name: str) -> None:
    vae, side = {"Wan2.1": (WAN21, 8), "Wan2.2": (WAN22, 16)}[name]
    for (plan, frames), measured in MEASURED[name].items():
        latents = (1, vae["z_dim"], 1 + (frames - 1) // 4, 480 // side, 832 // side)
        shape = latents if plan == "decode" else (1, 3, frames, 480, 832)
        need = coding(plan, vae, shape, accelerator=True)
        assert need.work / MIB == pytest.approx(measured, rel=2e-3)
