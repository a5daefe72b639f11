"""The latent cache, and the sampling loop against the one of diffusers' pipeline."""

import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from networks import network_of
from PIL import Image
from ranks import edit_json
from torch import Tensor

from wandistiller.batch import Batch, Conditioning
from wandistiller.data.dataset import PromptItem
from wandistiller.data.latent_cache import LatentCache, Rollouts
from wandistiller.data.media import MediaReader, Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.experts import Expert
from wandistiller.network.sampling import denoise
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.utils.logging import current
from wandistiller.wan.pipeline import open_wan

CPU = torch.device("cpu")
PROMPTS = ["a red circle", "a blue square"]
STEPS = 8  # at shift 3 the timesteps are 999 954 900 833 750 643 500 301: both experts work


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
    modules = {Expert.HIGH_NOISE: pipe.transformer, Expert.LOW_NOISE: pipe.transformer_2 or pipe.transformer}
    experts = {expert: network_of(module) for expert, module in modules.items()}
    scales = {Expert.HIGH_NOISE: high, Expert.LOW_NOISE: low}
    return GuidedTeacher(LocalTeacher(experts), Guidance(embeds(folder)[1][0], scales))


def start(frames: int = 2) -> Tensor:
    return torch.stack([keyed_normal((16, frames, 4, 6), "start", i) for i in range(2)])


def stock(folder: Path, steps: int, high: float, low: float | None) -> Tensor:
    """The pipeline's latents from the same noise and text."""
    text_BLD, null_BLD = embeds(folder)
    return pipeline(folder)(
        prompt_embeds=text_BLD,
        negative_prompt_embeds=null_BLD,
        latents=start(),
        height=32,
        width=48,
        num_frames=5,
        guidance_scale=high,
        guidance_scale_2=low,
        num_inference_steps=steps,
        output_type="latent",
    ).frames


def ours(folder: Path, steps: int, high: float, low: float) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    wan = open_wan(str(folder))
    return denoise(
        guided(folder, high, low).velocity, wan, wan.shift, start(), Conditioning(embeds(folder)[0]), steps
    )


@pytest.mark.parametrize(
    ("experts", "steps", "high", "low"),
    [(2, STEPS, 4.0, 3.0), (1, STEPS, 5.0, 5.0)],
)
def test_denoise_makes_the_stock_pipeline_s_latents(
    wan1: Path, wan2: Path, experts: int, steps: int, high: float, low: float
) -> None:
    folder = (wan1, wan2)[experts - 1]
    expected = stock(folder, steps, high, low if experts == 2 else None)
    torch.testing.assert_close(ours(folder, steps, high, low)[0], expected, rtol=0, atol=2e-5)


def test_every_step_of_a_long_rollout_shows_the_watchdog_progress(wan2: Path) -> None:
    before = current.heartbeats
    ours(wan2, STEPS, 4.0, 3.0)
    assert current.heartbeats - before >= STEPS


@pytest.mark.parametrize(("boundary", "high"), [(0.9, 3), (0.901, 2)])
def test_a_step_at_the_boundary_belongs_to_the_high_noise_expert(
    wan2: Path, copy_of: Callable[..., Path], boundary: float, high: int
) -> None:
    folder = copy_of(wan2)
    edit_json(folder / "model_index.json", boundary_ratio=boundary)
    experts = []

    def velocity(batch: Batch) -> Tensor:
        experts.append(batch.expert)
        return batch.x_t_BCFHW

    denoise(velocity, open_wan(str(folder)), 3.0, start(), Conditioning(embeds(wan2)[0]), STEPS)
    assert experts == [Expert.HIGH_NOISE] * high + [Expert.LOW_NOISE] * (STEPS - high)


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
        edit_json(folder / "model_index.json", scheduler=["diffusers", kind])
    x0, noise = torch.full_like(start(), 0.25), start()
    actual, _ = denoise(
        lambda _: noise - x0, open_wan(str(folder)), 3.0, noise, Conditioning(embeds(wan1)[0]), 10
    )
    torch.testing.assert_close(
        actual, x0, rtol=0, atol=0.01
    )  # timesteps are whole numbers: sigma 0.999 for 1


def picture(file: Path, value: int = 0) -> Path:
    Image.fromarray(np.random.default_rng(value).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)
    return file


ROLLOUTS = Rollouts(steps=2, per_prompt=1, keep_path=True, seed=0, shift=3.0)
SIZE = Size(32, 32, 1)


def cache_in(
    folder: Path, wan: Path, rollouts: Rollouts = ROLLOUTS, samples_per_file: int = 3
) -> LatentCache:
    return LatentCache(
        folder,
        open_wan(str(wan)),
        rollouts,
        CPU,
        reader=MediaReader(16.0),
        teacher_fingerprint="teacher",
        samples_per_file=samples_per_file,
    )


def made(*prompts: str, rollout: int = 0) -> list[Sample]:
    return [Sample(PromptItem(p), SIZE, rollout) for p in prompts]


def text_of(samples: list[Sample]) -> Conditioning:
    return Conditioning(torch.stack([keyed_normal((512, 32), "text", s.item.prompt) for s in samples]))


def fill(cached: LatentCache, wan: Path, samples: list[Sample]) -> list[int]:
    """Fill by a teacher without guidance; returns the prompts' count of each teacher call."""
    calls, teacher = [], guided(wan, 1.0, 1.0)

    def velocity(batch: Batch) -> Tensor:
        calls.append(len(batch.conditioning.text_BLD))
        return teacher.velocity(batch)

    assert cached.fill_media({cached.key(s): s for s in samples if s.item.media}) == {}
    cached.fill_rollouts({cached.key(s): s for s in samples if not s.item.media}, velocity, text_of)
    return calls


@pytest.mark.usefixtures("one_rank")
def test_cached_media_and_rollouts_are_found_by_their_sample(tmp_path: Path, wan1: Path) -> None:
    image = Sample(PromptItem("given", picture(tmp_path / "a.png")), SIZE)
    samples = [image, *made("made"), *made("made", rollout=1)]
    cached, wan = cache_in(tmp_path, wan1), open_wan(str(wan1))
    fill(cached, wan1, samples)
    pixels_CFHW = MediaReader(16.0).read(image.item.media, SIZE)
    assert torch.equal(cached[cached.key(image)], wan.load_vae(CPU).encode(pixels_CFHW[None])[0])
    for rollout, sample in enumerate(samples[1:]):
        noise = keyed_normal((16, 1, 4, 4), 0, "rollout", "made", rollout)
        velocity = guided(wan1, 1.0, 1.0).velocity
        expected, _ = denoise(velocity, wan, 3.0, noise[None], text_of(made("made")), 2)
        torch.testing.assert_close(cached[cached.key(sample)], expected[0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_the_states_of_a_rollout_are_its_path_and_then_x0_at_sigma_0(tmp_path: Path, wan1: Path) -> None:
    cached, (sample,) = cache_in(tmp_path, wan1), made("a")
    fill(cached, wan1, [sample])
    noise = keyed_normal((16, 1, 4, 4), 0, "rollout", "a", 0)
    velocity, wan = guided(wan1, 1.0, 1.0).velocity, open_wan(str(wan1))
    x0, path = denoise(velocity, wan, 3.0, noise[None], text_of([sample]), 2)
    sigma_S = cached.levels(key := cached.key(sample))
    x_SCFHW = torch.stack([cached.state(key, number) for number in range(3)])
    assert sigma_S.tolist() == torch.tensor([*(sigma for sigma, _ in path), 0.0]).tolist()
    assert torch.equal(x_SCFHW, torch.cat([*(x for _, x in path), x0])) and torch.equal(x_SCFHW[0], noise)


@pytest.mark.usefixtures("one_rank")
def test_only_missing_rollouts_are_made_again(tmp_path: Path, wan1: Path) -> None:
    samples = made(*"abcdef")  # in two files
    first = cache_in(tmp_path, wan1)
    assert fill(first, wan1, samples) == [3, 3, 3, 3]
    kept = [first[first.key(s)] for s in samples]
    max(tmp_path.rglob("*.safetensors")).unlink()
    again = cache_in(tmp_path, wan1)
    assert again.lacks_rollouts({again.key(s): s for s in samples})
    assert fill(again, wan1, samples) == [3, 3] and fill(again, wan1, samples) == []
    assert all(torch.equal(again[again.key(s)], x0) for s, x0 in zip(samples, kept, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_more_rollouts_in_another_order_keep_the_cached_ones(tmp_path: Path, wan1: Path) -> None:
    fill(cache_in(tmp_path, wan1), wan1, made(*"abc"))
    more = cache_in(tmp_path, wan1, Rollouts(2, 2, True, 0, 3.0))
    assert fill(more, wan1, made(*"dcba") + made("a", rollout=1)) == [2, 2]


@pytest.mark.usefixtures("one_rank")
def test_a_complete_cache_needs_neither_vae_nor_teacher_and_one_of_another_shift_seed_or_image_is_not_used(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Sample(PromptItem("b", picture(tmp_path / "a.png")), SIZE)
    fill(cache_in(tmp_path, wan1), wan1, [*made("a"), image])
    with monkeypatch.context() as without:
        without.setattr("wandistiller.wan.loaded_components.Vae", None)
        assert fill(cache_in(tmp_path, wan1), wan1, [*made("a"), image]) == []
    for other in (Rollouts(2, 2, True, 0, 5.0), Rollouts(2, 2, True, 1, 3.0), Rollouts(3, 2, True, 0, 3.0)):
        changed = cache_in(tmp_path, wan1, other)
        assert changed.lacks_rollouts({changed.key(s): s for s in made("a")})
    before = len(list(tmp_path.rglob("*.safetensors")))
    picture(image.item.media, 1)
    fill(cache_in(tmp_path, wan1), wan1, [image])
    assert len(list(tmp_path.rglob("*.safetensors"))) == before + 1


@pytest.mark.usefixtures("one_rank")
def test_an_unusable_medium_is_named_remembered_and_tried_again_once_repaired(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = tmp_path / "bad.png", picture(tmp_path / "good.png")
    bad.write_bytes(good.read_bytes()[:200])
    samples = [Sample(PromptItem("b", bad), SIZE), Sample(PromptItem("g", good), SIZE)]

    def unusable() -> dict[str, str]:
        cached = cache_in(tmp_path, wan1)
        return cached.fill_media({cached.key(s): s for s in samples})

    (message,) = unusable().values()
    assert message.startswith(f"{bad}: cannot be read: ")
    with monkeypatch.context() as without:
        without.setattr(MediaReader, "read", None)  # to open one would raise
        assert list(unusable().values()) == [message]
    picture(bad)
    assert unusable() == {}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_medium_that_the_system_refuses_to_read_is_tried_again_as_it_is(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sample = Sample(PromptItem("a", picture(tmp_path / "a.png")), SIZE)

    def unusable() -> list[str]:
        cached = cache_in(tmp_path, wan1)
        return list(cached.fill_media({cached.key(sample): sample}).values())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as refused:
        refused.setattr(Image, "open", refuse)
        assert f"{sample.item.media}: cannot be read: [Errno {number}]" in unusable()[0]
    assert unusable() == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["a.png", "a.gif", "a.mp4"])
def test_a_medium_that_is_away_while_it_is_encoded_is_tried_again(
    tmp_path: Path, wan1: Path, name: str
) -> None:
    file, away = tmp_path / name, tmp_path / "away"
    file.write_bytes(b"no picture")
    sample = Sample(PromptItem("a", file), SIZE)
    key = cache_in(tmp_path, wan1).key(sample)

    def unusable() -> str:
        return cache_in(tmp_path, wan1).fill_media({key: sample})[key]

    file.rename(away)
    assert "is no regular file" in unusable()
    away.rename(file)
    assert "is no regular file" not in unusable()
