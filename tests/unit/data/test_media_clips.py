"""Clips of a video, evenly spaced over it, and pictures shown whole between bars."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grey_videos import numbers, video
from PIL import Image

from wandistiller.config.identity import data_digest
from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.cached_dataset import AllSamples
from wandistiller.data.dataset import PromptDataset, read_dataset
from wandistiller.data.latent_cache import LatentCache, Rollouts
from wandistiller.data.media import LETTERBOX, MediaError, MediaReader, Size, pixels_depend_on
from wandistiller.data.tensor_cache import Sample
from wandistiller.utils.files import TINY, digest
from wandistiller.wan.pipeline import open_wan

ONE = Size(64, 64, 1)
NO_ROLLOUTS = Rollouts(20, 1, False, 0, 3.0)
WHITE, RED = (255, 255, 255), (255, 0, 0)


def clip(file: Path, number: int, clips: int, fps: float = 16.0) -> list[int]:
    """Numbers of the five frames of a clip, by their grey."""
    return numbers(MediaReader(fps, clips=clips).read(file, Size(32, 32, 5), number))


@pytest.mark.parametrize(
    ("name", "frames", "fps", "firsts"),
    [
        *((name, 59, 16, [0, 27, 54]) for name in ("a.mp4", "a.mkv")),
        ("a.gif", 59, 20, [0, 27, 54]),
        ("a.mp4", 35, 16, [0, 10, 20, 30]),
        ("short.mp4", 7, 16, [0, 1, 2]),
        ("shorter.mp4", 5, 16, [0, 0, 0]),
    ],
)
def test_clips_begin_evenly_from_the_first_frame_to_where_the_last_ends_the_video(
    tmp_path: Path, name: str, frames: int, fps: int, firsts: list[int]
) -> None:
    file = video(tmp_path / name, frames, fps)
    found = [clip(file, number, len(firsts), fps) for number in range(len(firsts))]
    assert found == [list(range(first, first + 5)) for first in firsts]


def test_no_clip_of_a_video_of_fewer_frames_can_be_used(tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", 3)
    for number in range(2):
        with pytest.raises(MediaError, match=r"has 3 frame\(s\)"):
            clip(file, number, 2)


def test_a_video_whose_header_says_too_much_is_counted(tmp_path: Path) -> None:
    whole = video(tmp_path / "a.mkv", 60).read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) * 2 // 3])  # its header still says 60 frames
    last = clip(tmp_path / "cut.mkv", 1, 2)
    assert last == list(range(last[0], last[0] + 5)) and 5 < last[0] < 55


def data(folder: Path) -> PromptDataset:
    """A picture, two videos, and two prompts without media."""
    for name in ("a.png", "b.mp4", "c.gif"):
        (folder / name).touch()
        (folder / name).with_suffix(".txt").write_text(f"prompt of {name}")
    (folder / "more.txt").write_text("one\ntwo\n")
    return read_dataset(str(folder))


def test_an_epoch_has_every_clip_of_a_video_and_a_picture_once(tmp_path: Path) -> None:
    assert data(tmp_path).samples(per_prompt=2, per_video=3) == 1 + 2 * 3 + 2 * 2


def test_each_clip_is_a_sample_with_its_video_s_prompt_and_size(tmp_path: Path) -> None:
    sizes = [ONE, Size(32, 96, 1)]
    samples = AllSamples(data(tmp_path), 1, sizes, np.array([0, 1, 0, 0, 0]), 3)
    drawn = [samples[n] for n in range(9)]
    assert [(s.item.media and s.item.media.name, s.clip, s.size) for s in drawn[:4]] == [
        ("a.png", 0, ONE),
        *(("b.mp4", number, sizes[1]) for number in range(3)),
    ]
    assert Counter(s.item.prompt for s in drawn) == {
        "prompt of a.png": 1,
        "prompt of b.mp4": 3,
        "prompt of c.gif": 3,
        "one": 1,
        "two": 1,
    }


def cache(folder: Path, **more: Any) -> LatentCache:
    given = {"reader": MediaReader(16.0, **more), "teacher_fingerprint": "", "samples_per_file": 1}
    return LatentCache(folder, open_wan(str(TINY["tiny"])), NO_ROLLOUTS, torch.device("cpu"), **given)


def test_clips_have_keys_of_their_own_but_the_first_that_of_a_run_of_one_clip(tmp_path: Path) -> None:
    item = next(i for i in data(tmp_path) if i.media and i.media.suffix == ".mp4")
    one, three, four = (cache(tmp_path, clips=n) for n in (1, 3, 4))
    keys = {c.key(Sample(item, ONE, clip=number)) for c in (three, four) for number in range(3)}
    assert len(keys) == 5 and one.key(Sample(item, ONE)) in keys


def test_bars_and_their_colour_count_for_the_key_of_every_medium(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.mp4", "a.gif"):
        given = [(WHITE, "crop"), (WHITE, LETTERBOX), (RED, LETTERBOX)]
        assert len({str(pixels_depend_on(Path(name), *each)) for each in given}) == 3


@pytest.fixture
def job(tmp_path: Path) -> Job:
    given = {"teacher_path": "tiny", "data_path": "tiny", "output_dir": str(tmp_path / "out")}
    return read_job(RunConfig(**given, shift=3.0, video_fps=16.0), 1, here=False)


def identity(job: Job, items: PromptDataset, **changed: object) -> str:
    return data_digest(replace(job, items=items, run=replace(job.run, **changed)))


def test_the_default_data_digest_is_that_of_earlier_versions(tmp_path: Path, job: Job) -> None:
    items = data(tmp_path)
    earlier = digest(items.digest, str(NO_ROLLOUTS), str(ONE), str([]), 16.0)
    assert identity(job, items) == earlier


@pytest.mark.parametrize("changed", [{"fit": LETTERBOX}, {"clips_per_video": 2}])
def test_clips_and_bars_count_for_a_run_s_identity_if_there_are_media(
    tmp_path: Path, job: Job, changed: dict[str, object]
) -> None:
    prompts, media = read_dataset("tiny"), data(tmp_path)
    assert identity(job, prompts, **changed) == identity(job, prompts)
    assert identity(job, media, **changed) != identity(job, media)


@pytest.mark.parametrize("shape", [(16, 32), (32, 16)], ids=["wide", "tall"])
def test_letterbox_shows_the_whole_picture_between_bars(tmp_path: Path, shape: tuple[int, int]) -> None:
    Image.new("RGB", shape[::-1], "black").save(tmp_path / "a.png")
    pixels_CFHW = MediaReader(16.0, RED, fit=LETTERBOX).read(tmp_path / "a.png", Size(32, 32, 1))
    red_HW = pixels_CFHW[0, 0] if shape == (16, 32) else pixels_CFHW[0, 0].T
    assert (red_HW[8:24] == -1).all() and (red_HW[:8] == 1).all() and (red_HW[24:] == 1).all()


def test_a_sliver_is_not_enlarged_into_a_letterbox(tmp_path: Path) -> None:
    Image.new("RGB", (1, 1), "black").save(tmp_path / "a.png")
    with pytest.raises(MediaError, match="under 1/16"):
        MediaReader(16.0, fit=LETTERBOX).read(tmp_path / "a.png", Size(32, 32, 1))
