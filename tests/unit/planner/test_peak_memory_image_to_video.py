"""Plans of published image-to-video Wans: what given frames cost."""

from pathlib import Path

import pytest
from image_data import image_data
from planned import EIGHT_80, RATES, published_job

from wandistiller.planner.peak_memory import plan
from wandistiller.planner.time import Times

FIVE = "Wan2.2-TI2V-5B"


@pytest.mark.slow
def test_first_frames_of_5b_cost_memory_and_time(published: Path, tmp_path: Path) -> None:
    """A time for each patch; a run of prompts alone has one for each sample."""
    found = []
    for data in (str(published / "prompts.txt"), str(image_data(tmp_path))):
        run = published_job(published, EIGHT_80, FIVE, data_path=data, num_frames=81)
        steps = plan(run, EIGHT_80, coding=False)["train"].alternatives
        calls = steps["teacher"]["a call of the teacher"], steps["student"]["student's activations"]
        found.append([*(b.transient for b in calls), Times(run, EIGHT_80, RATES).step()])
    assert all(given > text for text, given in zip(*found, strict=True))


@pytest.mark.slow
def test_the_image_encoder_is_on_the_gpu_while_frames_are_encoded(published: Path, tmp_path: Path) -> None:
    data = str(image_data(tmp_path))
    found = {}
    for wan in ("Wan2.2-I2V-A14B", "Wan2.1-I2V-14B-480P"):
        run = published_job(published, EIGHT_80, wan, data_path=data, num_frames=17)
        turns = plan(run, EIGHT_80)["prepare"].alternatives.values()
        found[wan] = max(parts["image encoder"].device if "image encoder" in parts else 0 for parts in turns)
    assert found == {"Wan2.2-I2V-A14B": 0, "Wan2.1-I2V-14B-480P": 4 * (632_076_800 - 1280 * 1024)}
