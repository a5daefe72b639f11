"""Plans of published image-to-video Wans: what is recommended, and what given frames cost."""

import json
from pathlib import Path

import pytest
from image_data import image_data
from planned import EIGHT_80, RATES, plan_output, published_job
from published_wan import IMAGE_TO_VIDEO
from slow_cases import slow_but

from wandistiller.planner.peak_memory import plan
from wandistiller.planner.time import Times

FIVE = "Wan2.2-TI2V-5B"
WANS = [FIVE, *(name.removeprefix("Wan-AI/").removesuffix("-Diffusers") for name in IMAGE_TO_VIDEO)]
MACHINE = "--gpus 8 --gpu_memory 80 --host_memory 1000 --disk 1800"


def rows(folder: Path, wan: str) -> str:
    """Prompts with first frames; with a clip for the Wan that is given its last frame too."""
    file = image_data(folder)
    if "FLF2V" in wan:
        file.write_text(json.dumps({"prompt": "left", "video": "clip.gif"}))
    return str(file)


@pytest.mark.parametrize("wan", slow_but([], WANS))
@pytest.mark.usefixtures("quiet_logging")
def test_what_is_recommended_for_an_image_to_video_wan_fits(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture, wan: str
) -> None:
    recipe = tmp_path / "recipe.json"
    clips = "--data_path", rows(tmp_path, wan), "--num_frames", "9", "--output_dir", str(tmp_path / "out")
    plan_output(published, capsys, MACHINE, *clips, "--recommend", str(recipe), wan=wan)
    output = plan_output(published, capsys, MACHINE, *clips, "--recipe", str(recipe), wan=wan)
    assert "\nfits: " in output and "NOT fit" not in output


@pytest.mark.slow
def test_first_frames_of_5b_cost_memory_and_time(published: Path, tmp_path: Path) -> None:
    """A time for each patch; a run of prompts alone has one for each sample."""
    found = []
    for data in (str(published / "prompts.txt"), rows(tmp_path, FIVE)):
        run = published_job(published, EIGHT_80, FIVE, data_path=data, num_frames=81)
        steps = plan(run, EIGHT_80, coding=False)["train"].alternatives
        calls = steps["teacher"]["a call of the teacher"], steps["student"]["student's activations"]
        found.append([*(b.transient for b in calls), Times(run, EIGHT_80, RATES).step()])
    assert all(given > text for text, given in zip(*found, strict=True))


@pytest.mark.slow
def test_the_image_encoder_is_on_the_gpu_while_frames_are_encoded(published: Path, tmp_path: Path) -> None:
    data = rows(tmp_path, "")
    found = {}
    for wan in ("Wan2.2-I2V-A14B", "Wan2.1-I2V-14B-480P"):
        run = published_job(published, EIGHT_80, wan, data_path=data, num_frames=17)
        turns = plan(run, EIGHT_80)["prepare"].alternatives.values()
        found[wan] = max(parts["image encoder"].device if "image encoder" in parts else 0 for parts in turns)
    assert found == {"Wan2.2-I2V-A14B": 0, "Wan2.1-I2V-14B-480P": 4 * (632_076_800 - 1280 * 1024)}
