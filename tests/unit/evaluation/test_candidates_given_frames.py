"""The images and videos that `sample` and `evaluate` begin with: read as in training, and before weights."""

from pathlib import Path
from typing import Any

import pytest
from image_data import noise
from image_wans import A14B, BOTH_ENDS, Wans
from recipes import recipe

from wandistiller.checkpoint.facts import Facts
from wandistiller.cli.main import main
from wandistiller.config.identity import provenance
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.media import MediaReader
from wandistiller.evaluation.candidates import reader_of
from wandistiller.wan.pipeline import open_wan

AS_TRAINED: list[dict[str, Any]] = [
    {"fit": "letterbox", "background": "black"},
    {"background": "#102030"},
    {"video_fps": 8.0},
    {},
]


@pytest.fixture(scope="module")
def wans(tmp_path_factory: pytest.TempPathFactory) -> Wans:
    return Wans(tmp_path_factory.mktemp("given_frames"))


@pytest.mark.parametrize("settings", AS_TRAINED)
def test_given_frames_are_read_as_in_the_run_that_made_a_student(
    wans: Wans, settings: dict[str, Any]
) -> None:
    given = recipe(wans.folder, wans[A14B], **wans.settings(A14B, **settings), output_dir="out")
    job = read_job(RunConfig(**given), 1)
    stored = Facts.of(provenance(job).as_json())
    reader = reader_of(stored, job.folder)
    trained = job.reader
    assert (reader.fps, reader.fit, reader.background) == (trained.fps, trained.fit, trained.background)


def test_given_frames_of_an_older_export_are_cropped_over_white_at_its_wan_s_rate(wans: Wans) -> None:
    assert reader_of(Facts(), open_wan(str(wans[A14B]))) == MediaReader(16.0)


def test_images_that_cannot_be_used_are_all_named_before_a_weight_is_read(
    wans: Wans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, *others = noise(0, 3)
    whole.save(tmp_path / "whole.jpg")
    half = (tmp_path / "whole.jpg").read_bytes()[:3000]
    (tmp_path / "half.jpg").write_bytes(half)
    whole.resize((1, 1)).save(tmp_path / "dot.png")
    whole.save(tmp_path / "moving.webp", save_all=True, append_images=others)
    (tmp_path / "text.png").write_text("no picture")
    files = [tmp_path / name for name in ("whole.jpg", "half.jpg", "dot.png", "moving.webp", "text.png")]
    monkeypatch.setattr("wandistiller.evaluation.draw_samples.sample", None)  # a call would raise
    words = ["sample", "--model", wans[A14B], "--prompts", *"abcde", "--image", *files, "--steps", "1"]
    words += "--height 32 --width 64 --num_frames 5 --guidance_scale 1 --output".split()
    assert main([*map(str, words), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert all(f"{file}: " in said for file in files[1:]) and "whole.jpg" not in said
    assert "is 1 x 1 pixels, under 1/16" in said and "is animated" in said and "Traceback" not in said


def test_a_row_whose_video_is_too_short_is_named_before_a_weight_is_read(
    wans: Wans, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wandistiller.evaluation.draw_samples.sample", None)  # a call would raise
    (rows := wans.folder / "data" / "clip.jsonl").write_text('{"prompt": "left", "video": "clip.gif"}')
    words = ["sample", "--model", wans[BOTH_ENDS], "--prompts", rows, "--output", wans.folder / "out"]
    words += "--height 32 --width 64 --num_frames 33 --guidance_scale 1 --steps 1".split()
    assert main([*map(str, words)]) == 2
    assert "clip.gif: has 12 frame(s) at 16 a second, the run wants 33." in capsys.readouterr().err
