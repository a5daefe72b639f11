"""Latents as diffusers' pipeline makes and reads them, media as pixels, and the sampling loop against its own."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.utils import export_to_video
from PIL import Image
from test_wan import edit
from torch import Tensor

from wandistiller import latents
from wandistiller.batch import Batch, Expert
from wandistiller.conditioning import Item
from wandistiller.config import ConfigError
from wandistiller.latents import LatentCache, Rollouts, Size, Vae, denoise, load_media
from wandistiller.noise import keyed_normal
from wandistiller.teacher import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.wan import open_wan

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "a blue square"]
STEPS = 8  # at shift 3 the timesteps are 999 954 900 833 750 643 500 301: both experts work
MEAN = torch.linspace(-1, 1, 16).view(16, 1, 1, 1)
STD = torch.linspace(0.5, 2, 16).view(16, 1, 1, 1)


@cache
def pipeline(folder: Path) -> WanPipeline:
    pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def embeds(folder: Path) -> tuple[Tensor, Tensor]:
    """text_BLD of PROMPTS and of an empty negative prompt."""
    with torch.no_grad():
        return pipeline(folder).encode_prompt(PROMPTS, ["", ""], max_sequence_length=512)


def guided(folder: Path, high: float, low: float) -> GuidedTeacher:
    pipe = pipeline(folder)
    experts = {Expert.HIGH_NOISE: pipe.transformer, Expert.LOW_NOISE: pipe.transformer_2 or pipe.transformer}
    scales = {Expert.HIGH_NOISE: high, Expert.LOW_NOISE: low}
    return GuidedTeacher(LocalTeacher(experts), Guidance(embeds(folder)[1][0], scales))


def start(frames: int = 2) -> Tensor:
    return torch.stack([keyed_normal((16, frames, 4, 6), "start", i) for i in range(2)])


def stock(folder: Path, steps: int, high: float, low: float | None, output_type: str = "latent") -> Tensor:
    """What the pipeline makes of the same noise and text."""
    text_BLD, null_BLD = embeds(folder)
    return pipeline(folder)(
        prompt_embeds=text_BLD, negative_prompt_embeds=null_BLD, latents=start(), height=32, width=48, num_frames=5,
        guidance_scale=high, guidance_scale_2=low, num_inference_steps=steps, output_type=output_type,
    ).frames  # fmt: skip


def ours(folder: Path, steps: int, high: float, low: float) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    wan = open_wan(str(folder))
    return denoise(guided(folder, high, low).velocity, wan, wan.shift, start(), embeds(folder)[0], steps)


@pytest.mark.parametrize("steps", [1, STEPS])
def test_denoise_makes_the_stock_pipeline_s_latents_with_two_experts_and_guidance(wan2: Path, steps: int) -> None:
    torch.testing.assert_close(ours(wan2, steps, 4.0, 3.0)[0], stock(wan2, steps, 4.0, 3.0), rtol=0, atol=2e-5)


def test_denoise_makes_the_stock_pipeline_s_latents_with_one_expert(wan1: Path) -> None:
    torch.testing.assert_close(ours(wan1, STEPS, 5.0, 5.0)[0], stock(wan1, STEPS, 5.0, None), rtol=0, atol=2e-5)


def test_denoise_makes_the_stock_pipeline_s_latents_without_guidance(wan2: Path) -> None:
    torch.testing.assert_close(ours(wan2, STEPS, 1.0, 1.0)[0], stock(wan2, STEPS, 1.0, 1.0), rtol=0, atol=2e-5)


def test_guidance_and_experts_matter_here(wan2: Path) -> None:
    right = stock(wan2, STEPS, 4.0, 3.0)
    for other in (ours(wan2, STEPS, 3.0, 4.0)[0], ours(wan2, STEPS, 1.0, 1.0)[0]):
        assert (other - right).abs().max() > 0.01


@pytest.mark.parametrize(("boundary", "high"), [(0.875, 3), (0.9, 3), (0.901, 2), (0.833, 4)])
def test_a_step_at_the_boundary_belongs_to_the_high_noise_expert(
    wan2: Path, copy_of: Callable[..., Path], boundary: float, high: int
) -> None:
    folder = copy_of(wan2)
    edit(folder / "model_index.json", boundary_ratio=boundary)
    asked = []

    def velocity(batch: Batch) -> Tensor:
        asked.append(batch.expert)
        return batch.x_t_BCFHW

    denoise(velocity, open_wan(str(folder)), 3.0, start(), embeds(wan2)[0], STEPS)
    assert asked == [Expert.HIGH_NOISE] * high + [Expert.LOW_NOISE] * (STEPS - high)


def test_the_path_begins_at_the_noise_and_its_sigmas_fall(wan2: Path) -> None:
    _, path = ours(wan2, STEPS, 1.0, 1.0)
    assert [sigma for sigma, _ in path] == [0.999, 0.954, 0.9, 0.833, 0.75, 0.643, 0.5, 0.301]
    assert torch.equal(path[0][1], start())


def test_the_shift_that_is_asked_for_replaces_the_scheduler_s(wan2: Path) -> None:
    text_BLD = embeds(wan2)[0]
    _, path = denoise(lambda b: b.x_t_BCFHW, open_wan(str(wan2)), 1.0, start(), text_BLD, 4)
    assert [round(sigma, 2) for sigma, _ in path] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("kind", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_a_straight_field_is_followed_to_its_x0_by_any_scheduler(
    wan1: Path, copy_of: Callable[..., Path], kind: str
) -> None:
    folder = copy_of(wan1)
    config = folder / "scheduler" / "scheduler_config.json"
    if kind.startswith("Flow"):
        config.write_text(
            '{"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}'
        )
    x0, noise = torch.full_like(start(), 0.25), start()
    found, _ = denoise(lambda _: noise - x0, open_wan(str(folder)), 3.0, noise, embeds(wan1)[0], 10)
    torch.testing.assert_close(found, x0, rtol=0, atol=0.01)  # timesteps are whole numbers: sigma 0.999 for 1


@pytest.fixture(scope="module")
def scaled(wan1: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one-expert pipeline with a mean and deviation of latents that differ per channel."""
    folder = tmp_path_factory.mktemp("scaled")
    pipe = WanPipeline.from_pretrained(wan1, torch_dtype=torch.float32)
    pipe.vae.register_to_config(latents_mean=MEAN.flatten().tolist(), latents_std=STD.flatten().tolist())
    pipe.save_pretrained(folder)
    return folder


def test_decoding_gives_the_stock_pipeline_s_pixels(scaled: Path) -> None:
    latent, pixels_BFCHW = (stock(scaled, 2, 1.0, None, kind) for kind in ("latent", "pt"))
    torch.testing.assert_close(
        Vae(open_wan(str(scaled)), CPU).decode(latent), pixels_BFCHW.transpose(1, 2), rtol=0, atol=1e-6
    )


@torch.no_grad()
def test_encoding_gives_the_mode_less_the_mean_over_the_deviation(scaled: Path) -> None:
    pixels = keyed_normal((2, 3, 5, 32, 48), "pixels").clamp(-1, 1)
    vae = AutoencoderKLWan.from_pretrained(scaled / "vae", torch_dtype=torch.float32)
    expected = (vae.encode(pixels).latent_dist.mode() - MEAN) / STD
    found = Vae(open_wan(str(scaled)), CPU).encode(pixels)
    assert found.shape == (2, *open_wan(str(scaled)).latent_shape(32, 48, 5))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_decoding_undoes_the_normalisation_of_encoding(scaled: Path) -> None:
    pixels = keyed_normal((1, 3, 1, 32, 32), "pixels").clamp(-1, 1)
    vae, own = (
        Vae(open_wan(str(scaled)), CPU),
        AutoencoderKLWan.from_pretrained(scaled / "vae", torch_dtype=torch.float32),
    )
    direct = own.decode(own.encode(pixels).latent_dist.mode()).sample
    torch.testing.assert_close(vae.decode(vae.encode(pixels)), (direct / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5)


def picture(file: Path, array_HWC: np.ndarray, mode: str = "RGB") -> Path:
    Image.fromarray(array_HWC).convert(mode).save(file)
    return file


def noise_HWC(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_an_image_of_the_right_size_keeps_every_pixel_scaled_to_minus_1_and_1(tmp_path: Path) -> None:
    array = noise_HWC(16, 32)
    array[0, 0], array[0, 1] = 0, 255
    pixels_CFHW = load_media(picture(tmp_path / "a.png", array), 16, 32, 1)
    assert pixels_CFHW.shape == (3, 1, 16, 32) and pixels_CFHW[:, 0, 0, 0].tolist() == [-1.0] * 3
    assert pixels_CFHW[:, 0, 0, 1].tolist() == [1.0] * 3
    assert ((pixels_CFHW[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy().tolist() == array.tolist()


@pytest.mark.parametrize(("mode", "name"), [("L", "a.png"), ("RGBA", "a.png"), ("P", "a.gif"), ("CMYK", "a.jpg")])
def test_every_image_mode_becomes_rgb(tmp_path: Path, mode: str, name: str) -> None:
    assert load_media(picture(tmp_path / name, noise_HWC(16, 16), mode), 16, 16, 1).shape == (3, 1, 16, 16)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)], ids=["wide", "tall"])
def test_an_image_of_another_shape_is_cropped_in_the_middle(tmp_path: Path, shape: tuple[int, int]) -> None:
    array = np.zeros((*shape, 3), dtype=np.uint8)
    array[shape[0] // 2 - 8 : shape[0] // 2 + 8, shape[1] // 2 - 8 : shape[1] // 2 + 8] = 255
    assert torch.equal(load_media(picture(tmp_path / "a.png", array), 16, 16, 1), torch.ones(3, 1, 16, 16))


def test_a_small_image_is_enlarged_to_cover(tmp_path: Path) -> None:
    array = np.full((8, 8, 3), 51, dtype=np.uint8)
    pixels = load_media(picture(tmp_path / "a.png", array), 16, 32, 1)
    torch.testing.assert_close(pixels, torch.full((3, 1, 16, 32), 51 / 127.5 - 1))


def test_a_photo_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    array = np.zeros((16, 16, 3), dtype=np.uint8)
    array[:8] = 255  # bright above; orientation 3 means: show it upside down
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.fromarray(array).save(tmp_path / "a.png", exif=exif)
    pixels = load_media(tmp_path / "a.png", 16, 16, 1)
    assert pixels[0, 0, 0, 0] == -1 and pixels[0, 0, -1, 0] == 1


def video(file: Path, frames: int) -> Path:
    """Frame i is grey 20 i."""
    pictures = [Image.fromarray(np.full((32, 32, 3), 20 * i, dtype=np.uint8)) for i in range(frames)]
    if file.suffix == ".gif":
        pictures[0].save(file, save_all=True, append_images=pictures[1:])
    else:
        export_to_video(pictures, str(file), fps=8)
    return file


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_the_first_frames_of_a_video_are_taken(tmp_path: Path, name: str) -> None:
    pixels_CFHW = load_media(video(tmp_path / name, 8), 32, 32, 5)
    grey_F = (pixels_CFHW.mean((0, 2, 3)) + 1) * 127.5
    torch.testing.assert_close(grey_F, 20.0 * torch.arange(5), rtol=0, atol=4.0)


def test_a_video_with_too_few_frames_names_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a.gif: has 3 frame\(s\), the run wants 5"):
        load_media(video(tmp_path / "a.gif", 3), 32, 32, 5)


@pytest.mark.parametrize("name", ["a.png", "a.mp4", "a.gif"])
def test_a_medium_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no medium")
    with pytest.raises(ConfigError, match=name):
        load_media(tmp_path / name, 16, 16, 1)


ROLLOUTS = Rollouts(steps=2, per_prompt=2, keep_path=True, seed=0, shift=3.0)


def cache_in(
    folder: Path, wan: Path, items: list[Item], rollouts: Rollouts = ROLLOUTS, shard_size: int = 3
) -> LatentCache:
    size = Size(32, 32, 1)
    return LatentCache(folder, open_wan(str(wan)), items, size, rollouts, "vae", "teacher", shard_size)


def text_of(prompt: str) -> Tensor:
    return keyed_normal((512, 32), "text", prompt)


def fill(cached: LatentCache, wan: Path) -> list[tuple]:
    """Fill by a teacher without guidance; returns the prompts' count of each teacher call."""
    calls, teacher = [], guided(wan, 1.0, 1.0)

    def velocity(batch: Batch) -> Tensor:
        calls.append(len(batch.text_BLD))
        return teacher.velocity(batch)

    cached.fill_media(CPU)
    cached.fill_rollouts(velocity, text_of, CPU)
    return calls


@pytest.mark.usefixtures("one_rank")
def test_cached_media_and_rollouts_are_found_by_number(tmp_path: Path, scaled: Path) -> None:
    image = picture(tmp_path / "a.png", noise_HWC(32, 32))
    cached = cache_in(tmp_path, scaled, [Item("made"), Item("given", image)])
    fill(cached, scaled)
    wan = open_wan(str(scaled))
    assert cached.prompts == ["given", "made", "made"] and not cached.lacks_rollouts()
    assert torch.equal(cached[0], Vae(wan, CPU).encode(load_media(image, 32, 32, 1)[None])[0])
    for n in range(2):
        noise = keyed_normal((16, 1, 4, 4), 0, "rollout", "made", n)
        expected, _ = denoise(guided(scaled, 1.0, 1.0).velocity, wan, 3.0, noise[None], text_of("made")[None], 2)
        torch.testing.assert_close(cached[1 + n], expected[0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_only_what_a_cache_lacks_is_made_again(tmp_path: Path, wan1: Path) -> None:
    items = [Item(p) for p in "abc"]  # six samples in two files
    first = cache_in(tmp_path, wan1, items)
    assert fill(first, wan1) == [3, 3, 3, 3]
    kept = [first[i] for i in range(6)]
    max(tmp_path.rglob("*.safetensors")).unlink()
    again = cache_in(tmp_path, wan1, items)
    assert again.lacks_rollouts() and fill(again, wan1) == [3, 3] and fill(again, wan1) == []
    assert all(torch.equal(again[i], kept[i]) for i in range(6))


@pytest.mark.usefixtures("one_rank")
def test_a_cache_of_another_shift_seed_or_image_is_not_used(tmp_path: Path, wan1: Path) -> None:
    image = picture(tmp_path / "a.png", noise_HWC(32, 32))
    fill(cache_in(tmp_path, wan1, [Item("a"), Item("b", image)]), wan1)
    for other in (Rollouts(2, 2, True, 0, 5.0), Rollouts(2, 2, True, 1, 3.0), Rollouts(3, 2, True, 0, 3.0)):
        assert cache_in(tmp_path, wan1, [Item("a")], other).lacks_rollouts()
    picture(image, noise_HWC(32, 32) // 2)
    changed = cache_in(tmp_path, wan1, [Item("b", image)])
    before = len(list(tmp_path.rglob("*.safetensors")))
    changed.fill_media(CPU)
    assert len(list(tmp_path.rglob("*.safetensors"))) == before + 1


@pytest.mark.usefixtures("one_rank")
def test_a_complete_cache_needs_neither_vae_nor_teacher(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [Item("a"), Item("b", picture(tmp_path / "a.png", noise_HWC(32, 32)))]
    fill(cache_in(tmp_path, wan1, items), wan1)
    monkeypatch.setattr(latents, "Vae", None)
    assert fill(cache_in(tmp_path, wan1, items), wan1) == []
