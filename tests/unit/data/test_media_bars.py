"""Pictures shown whole between bars."""

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from wandistiller.config.identity import data_digest
from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.dataset import PromptDataset, read_dataset
from wandistiller.data.latent_cache import Rollouts
from wandistiller.data.media import LETTERBOX, MediaError, MediaReader, Size, pixels_depend_on
from wandistiller.utils.files import digest

ONE = Size(64, 64, 1)
NO_ROLLOUTS = Rollouts(20, 1, False, 0, 3.0)
WHITE, RED = (255, 255, 255), (255, 0, 0)


def data(folder: Path) -> PromptDataset:
    """A picture, two videos, and two prompts without media."""
    for name in ("a.png", "b.mp4", "c.gif"):
        (folder / name).touch()
        (folder / name).with_suffix(".txt").write_text(f"prompt of {name}")
    (folder / "more.txt").write_text("one\ntwo\n")
    return read_dataset(str(folder))


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


def test_bars_count_for_a_run_s_identity_if_there_are_media(tmp_path: Path, job: Job) -> None:
    prompts, media = read_dataset("tiny"), data(tmp_path)
    assert identity(job, prompts, fit=LETTERBOX) == identity(job, prompts)
    assert identity(job, media, fit=LETTERBOX) != identity(job, media)


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
