"""The VAE whole and in tiles: the choice by free bytes, planned and real memory, and the values."""

import math
from itertools import product
from pathlib import Path

import pytest
import torch
from published_wan import VAE21 as PUBLISHED
from slow_cases import slow_but
from small_wan import VAE21, VAE22
from torch import Tensor

from wandistiller.network.activation_memory import Live
from wandistiller.utils.files import TINY
from wandistiller.utils.system_memory import GIB
from wandistiller.wan import fake_tensor_memory
from wandistiller.wan.components import decoded, encoded, vae_of
from wandistiller.wan.fake_tensor_memory import coding, tile
from wandistiller.wan.loaded_components import load_vae
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.vae import FittingVae, fitting

CLIP = (1, 16, 21, 60, 104)  # latents of 81 frames of 480x832
VAES = {"Wan2.1": (VAE21, 8), "Wan2.2": (VAE22, 16)}
MEASURED = [("encode", (1, 3, 1, 480, 832), 847), ("decode", (1, 16, 1, 60, 104), 926)]
"""MiB by tests/bench/vae_memory.py, in tiles."""
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("gib", "tiles", "work"),
    slow_but([(9, False, 8.76)], [(9, False, 8.76), (8, True, 2.05), (1, True, 2.05)]),
)
def test_a_clip_is_decoded_in_tiles_if_its_8_8_gib_are_not_free(gib: int, tiles: bool, work: float) -> None:
    need, chosen = fitting("decode", PUBLISHED, CLIP, gib * GIB, accelerator=True)
    assert chosen is tiles and need.work / GIB == pytest.approx(work, abs=0.01)


def test_a_call_of_one_tile_stays_whole_though_it_does_not_fit() -> None:
    need, tiles = fitting("decode", PUBLISHED, (1, 16, 1, 32, 32), 0, accelerator=True)
    assert not tiles and need == coding("decode", PUBLISHED, (1, 16, 1, 32, 32), accelerator=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [
        pytest.param((1, 288, 480), id="2x2 tiles"),
        pytest.param((9, 64, 320), id="2 tiles, 9 frames"),
    ],
)
@pytest.mark.parametrize("name", VAES)
def test_planned_memory_of_tiles_is_at_least_that_of_real_tensors(name: str, size: tuple[int, ...]) -> None:
    (vae, spatial), (frames, *sides) = VAES[name], size
    pixels, z = (1, 3, frames, *sides), vae["z_dim"]
    latents = (1, z, (frames - 1) // 4 + 1, *(n // spatial for n in sides))
    for plan, call, shape in (("encode", encoded, pixels), ("decode", decoded, latents)):
        model, x_BCFHW = FittingVae.from_config(vae_of(vae).config), torch.zeros(shape)
        in_tiles(model, x_BCFHW, call.__name__.removesuffix("d"))
        with torch.no_grad(), Live(cudnn=True) as measured:
            call(model, x_BCFHW)
        planned = coding(plan, vae, shape, accelerator=True, tiles=True).work
        assert measured.most <= planned <= 1.5 * measured.most


@pytest.mark.parametrize(("name", "frames"), slow_but([("Wan2.2", 5)], product(VAES, (1, 5))))
def test_planned_memory_of_a_batch_is_at_least_that_of_real_tensors(name: str, frames: int) -> None:
    vae, spatial = VAES[name]
    pixels, z = (3, 3, frames, 32, 64), vae["z_dim"]
    latents = (3, z, (frames - 1) // 4 + 1, 32 // spatial, 64 // spatial)
    for plan, call, shape in (("encode", encoded, pixels), ("decode", decoded, latents)):
        model = vae_of(vae)
        model.enable_slicing()
        with torch.no_grad(), Live(cudnn=True) as measured:
            call(model, torch.zeros(shape))
        assert measured.most <= coding(plan, vae, shape, accelerator=True).work <= 1.5 * measured.most


@pytest.fixture
def vae() -> FittingVae:
    return load_vae(TINY["tiny"] / "vae")


def scene_BCFHW(height: int, width: int) -> Tensor:
    """Slow waves of colour, unlike in all places."""
    y, x = torch.linspace(0, 9, height)[:, None], torch.linspace(0, 12, width)
    return torch.stack([torch.sin(x + y), torch.sin(x - y), torch.cos(x * y / 9)])[None, :, None]


@torch.no_grad()
def test_pixels_of_an_untrained_wan_vae_in_tiles_differ_by_a_tenth_at_the_most() -> None:
    torch.manual_seed(0)
    vae, z_BCFHW = FittingVae(**VAE21).eval(), torch.randn(1, 16, 1, 8, 40)
    whole = decoded(vae, z_BCFHW)
    tiled = decoded(in_tiles(vae, z_BCFHW, "decode"), z_BCFHW)
    assert 0 < (tiled - whole).abs().max() < 0.1


@pytest.mark.parametrize(("call", "shape", "measured_mib"), MEASURED)
def test_on_a_cpu_tiles_take_at_most_what_is_planned(
    call: str, shape: tuple[int, ...], measured_mib: int
) -> None:
    planned = coding(call, PUBLISHED, shape, accelerator=False, tiles=True).work / 2**20
    assert measured_mib <= planned <= 1.5 * measured_mib


def test_the_last_tile_is_no_sliver() -> None:
    lasts = {n: [*range(0, n, tile(n)[1])][-1] for n in (480, 704, 720, 832, 1280)}
    assert {n: n - last for n, last in lasts.items()} == {480: 240, 704: 176, 720: 144, 832: 208, 1280: 128}


def test_memory_that_a_check_has_traced_is_not_traced_again_when_the_vae_is_loaded(
    wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, latents = open_wan(str(wan1)), torch.zeros(1, 16, 1, 4, 6)
    folder.vae_need("decode", (1, 16, 1, 4, 6), math.inf, accelerator=False)
    monkeypatch.delattr(fake_tensor_memory, "vae_of")  # all tracing begins with it
    assert folder.load_vae(CPU).decode(latents).shape == (1, 3, 1, 32, 48)


def in_tiles(vae: FittingVae, x_BCFHW: Tensor, call: str) -> FittingVae:
    """Choose as if nothing were free."""
    _, vae.chosen[call, x_BCFHW.shape] = fitting(call, vae.config, x_BCFHW.shape, 0, accelerator=True)
    return vae


@torch.no_grad()
def test_where_there_is_room_the_values_are_those_of_diffusers_whole_calls(vae: FittingVae) -> None:
    pixels, stock = scene_BCFHW(64, 320), vae_of(vae.config)
    stock.load_state_dict(vae.state_dict())
    assert torch.equal(encoded(vae, pixels), encoded(stock, pixels))


@pytest.mark.slow
@torch.no_grad()
def test_a_size_that_is_chosen_for_tiles_leaves_others_whole(vae: FittingVae) -> None:
    small, large = torch.zeros(1, vae.config.z_dim, 1, 40, 40), torch.zeros(1, vae.config.z_dim, 1, 40, 56)
    decoded(in_tiles(vae, large, "decode"), large)
    assert vae.use_tiling
    decoded(vae, small)
    assert not vae.use_tiling
