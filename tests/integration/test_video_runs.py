"""The embedded video teacher, through training and evaluation to frames, an MP4 and figures of motion."""

from pathlib import Path

import imageio_ffmpeg
import pytest
from PIL import Image
from ranks import ROOT, wandistiller

from wandistiller.utils.files import read_json

pytestmark = pytest.mark.slow  # tests/unit/tiny has the teacher's clips, test_evaluate.py the figures

PROMPTS = "a red circle on a blue background, moving left\na white cross on a black background, growing\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps whose student was compared with its teacher on two prompts."""
    output = tmp_path_factory.mktemp("clips") / "run"
    short = {"max_steps": 2, "rollout_steps": 1, "sample_steps": 1, "output_dir": output}
    flags = [word for key, value in short.items() for word in (f"--{key}", value)]
    wandistiller("train", "--recipe", ROOT / "ds_configs" / "recipes" / "video.json", *flags)
    (prompts := output / "two.txt").write_text(PROMPTS)
    student = ["--student_path", output / "student"]
    wandistiller("evaluate", *student, "--prompts", prompts, "--steps", 2, "--quick")
    return output


def test_both_sides_have_figures_of_motion_speed_and_flicker(run: Path) -> None:
    figures = read_json(run / "evaluation.json")
    for side in ("teacher", "student"):
        moving = {"fully_right", "speed", "flicker", "motion", "frame_motion", "colour_drift"}
        assert moving <= figures[side].keys()
    assert figures["ratio"]["motion"]["value"] > 0


def test_all_nine_frames_of_both_prompts_are_shown_and_play(run: Path) -> None:
    width, height = Image.open(run / "evaluation_frames.png").size
    tile = 144 + 6  # 48 pixels, three times as large, and the gap
    assert (width, height // tile) == (
        7 * (4 * tile // 33) + 9 * tile,
        4,
    )  # two prompts, each of teacher and student
    about = next(imageio_ffmpeg.read_frames(str(run / "evaluation.mp4")))
    assert about["codec"] == "h264" and about["duration"] >= 4


def test_samples_of_training_play_teacher_above_student_and_their_png_has_three_frames(run: Path) -> None:
    prompts, tile = read_json(run / "resolved" / "run.json")["sample_prompts"], 144 + 6
    width, height = Image.open(run / "samples" / "step_00000002.png").size
    columns = min(4, len(prompts))
    bands = -(-len(prompts) // 4)
    left = 7 * max(13, columns * tile // 33)
    assert (width, height // tile // bands) == (left + columns * tile, 2 * 3)
    about = next(imageio_ffmpeg.read_frames(str(run / "samples" / "step_00000002.mp4")))
    assert about["codec"] == "h264" and about["pix_fmt"].startswith("yuv420p") and about["fps"] == 16
    assert about["size"][0] == width and about["size"][1] // tile // bands == 2
