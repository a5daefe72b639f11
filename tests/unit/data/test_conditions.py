"""What a Wan is given of rows with the images that clips begin and end with, against diffusers' pipeline."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawing import stock
from PIL import Image
from small_wan import IMAGE_FORMS, make_wan

from wandistiller.data.conditions import Conditions, given_frames
from wandistiller.data.dataset import PromptItem
from wandistiller.data.latent_cache import LatentCache, Rollouts
from wandistiller.data.media import MediaError, MediaReader, Size
from wandistiller.data.tensor_cache import Sample
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan

CPU, READER = torch.device("cpu"), MediaReader(16.0)
SIDE, FRAMES, NAMES = 64, 5, ("0.png", "1.png")
pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def both_ends(tmp_path_factory: pytest.TempPathFactory) -> WanFolder:
    return open_wan(str(make_wan(tmp_path_factory.mktemp("wan"), **IMAGE_FORMS["Wan2.1-FLF2V-14B"])))


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    """A row of two pictures: one of the run's size, and one that is twice as wide."""
    for number, (name, width) in enumerate(zip(NAMES, (SIDE, 2 * SIDE), strict=True)):
        noise = torch.randint(256, (SIDE, width, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(noise.to(torch.uint8).numpy()).save(tmp_path / name)
    first, last = (tmp_path / name for name in NAMES)
    return Sample(PromptItem("a red circle", None, first, last), Size(SIDE, SIDE, FRAMES))


def conditions(cache: Path, folder: WanFolder) -> Conditions:
    return Conditions(cache, folder, CPU, READER, samples_per_file=1)


def keys(cache: Path, folder: WanFolder, row: Sample, fps: float = 16.0) -> tuple[str | None, str]:
    """Return the keys of a row's frames and latents, by a new reader."""
    how = {"reader": MediaReader(fps), "samples_per_file": 1}
    rollouts = Rollouts(2, 1, False, 0, 3.0)
    latents = LatentCache(cache, folder, rollouts, CPU, teacher_fingerprint="", **how)
    return Conditions(cache, folder, CPU, **how).key(row).frames, latents.key(row)


@torch.no_grad()
def test_a_row_of_two_images_gives_what_diffusers_prepares_of_them(
    both_ends: WanFolder, sample: Sample, tmp_path: Path
) -> None:
    made = conditions(tmp_path / "cache", both_ends)
    assert made.fill_frames([sample]) == {}
    made.text.fill([sample.item.prompt])
    given = made.of([sample])
    pipe, (first, last) = stock(both_ends.path), map(Image.open, sample.item.images)
    last = last.crop((SIDE // 2, 0, SIDE // 2 + SIDE, SIDE))  # scaled to cover the size: the middle
    pixels = [pipe.video_processor.preprocess(image, SIDE, SIDE) for image in (first, last)]
    how = {"height": SIDE, "width": SIDE, "num_frames": FRAMES, "dtype": torch.float32}
    _, joined = pipe.prepare_latents(pixels[0], 1, **how, last_image=pixels[1])
    torch.testing.assert_close(given.joined_BCFHW, joined, rtol=1e-5, atol=1e-5)
    states = pipe.encode_image([first, last], CPU).flatten(0, 1)
    torch.testing.assert_close(given.image_BLD[0], states, rtol=1e-5, atol=1e-5)


def test_a_wan_that_is_given_the_first_frame_alone_takes_it_from_a_video_that_is_too_short(
    both_ends: WanFolder, tmp_path: Path
) -> None:
    first_alone = open_wan(str(make_wan(tmp_path / "wan", **IMAGE_FORMS["Wan2.2-TI2V-5B"])))
    first, second = (Image.new("RGB", (SIDE, SIDE), colour) for colour in ("black", "white"))
    first.save(tmp_path / "short.gif", save_all=True, append_images=[second], duration=60)
    sample = Sample(PromptItem("a", tmp_path / "short.gif"), Size(SIDE, SIDE, FRAMES))
    assert torch.equal(given_frames(first_alone, READER, sample), -torch.ones(3, 1, SIDE, SIDE))
    with pytest.raises(MediaError, match="has 2 frame"):
        given_frames(both_ends, READER, sample)


def test_the_caches_know_a_row_by_both_of_its_images(
    both_ends: WanFolder, sample: Sample, tmp_path: Path
) -> None:
    """Encoded frames and the teacher's clips, of other rows and of other files of the same name."""
    first, last = sample.item.images
    pairs = [(first, last), (last, first), (first, first), (first, None)]
    rows = [replace(sample, item=PromptItem("a red circle", None, *pair)) for pair in pairs]
    before = [(*keys(tmp_path, both_ends, row), row.item.key) for row in rows]
    assert [len(set(column)) for column in zip(*before, strict=True)] == [4, 4, 4]
    Image.new("RGB", (SIDE, SIDE)).save(last)
    assert not {*keys(tmp_path, both_ends, sample)} & {*before[0]}
    assert keys(tmp_path, both_ends, rows[2]) == before[2][:2]


def test_the_caches_know_given_images_wherever_they_lie_and_at_any_rate_of_videos(
    both_ends: WanFolder, sample: Sample, tmp_path: Path
) -> None:
    def keys_at(row: Sample, fps: float) -> tuple[str | None, str]:
        return keys(tmp_path, both_ends, row, fps)

    (there := tmp_path / "there").mkdir()
    moved = [Path(shutil.copyfile(image, there / image.name)) for image in sample.item.images]
    elsewhere = replace(sample, item=PromptItem("a red circle", None, *moved))
    assert keys_at(sample, 16.0) == keys_at(sample, 20.0) == keys_at(elsewhere, 16.0)
    pixels = Image.open(moved[0]).rotate(180)
    pixels.save(moved[0])
    assert not {*keys_at(sample, 16.0)} & {*keys_at(elsewhere, 16.0)}


def test_a_last_image_that_cannot_be_read_is_named(
    both_ends: WanFolder, sample: Sample, tmp_path: Path
) -> None:
    sample.item.last_image.write_bytes(b"no picture")
    (why,) = conditions(tmp_path / "cache", both_ends).fill_frames([sample]).values()
    begins_with, last = sample.item.images
    assert why.startswith(f"{begins_with}: its last image {last} cannot be read: ")
