"""A run on ComfyUI's files is the run on diffusers' folder of the same weights, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comfy_files import comfy_files, weights_in
from diffusers import WanPipeline
from ranks import wandistiller
from recipes import REPLICATED, SHARDED, recipe_file, train

from wandistiller.utils.files import TINY

PLACEMENTS: dict[str, dict[str, Any]] = {
    "files": {"wandistiller": {"placement": "files"}},
    "replicated": REPLICATED,
    "streamed": {"wandistiller": {"placement": "streamed"}},
    "sharded": SHARDED,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def teachers(folder: Path) -> dict[str, Path | str]:
    return {"folder": "tiny", "files": comfy_files(TINY["tiny"], folder / "models")}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_prepare_and_two_steps_are_those_of_the_folder(
    placement: str, teachers: dict[str, Path | str], tmp_path: Path
) -> None:
    # the embedded teacher has a usual guidance of its own
    more = {"max_steps": 2, "guidance_scale": 2.0, "teacher_deepspeed_config": PLACEMENTS[placement]}
    runs = [train(tmp_path / name, teacher, ranks=1, **more) for name, teacher in teachers.items()]
    assert losses(runs[0]) == losses(runs[1])
    for part in ("transformer", "vae", "text_encoder"):
        expected, made = (weights_in(run / "student" / part) for run in runs)
        made.pop("spiece_model", None)  # in the text encoder's file, which is linked and not copied
        assert expected.keys() == made.keys()
        assert all(torch.equal(value, made[name]) for name, value in expected.items())
    student = WanPipeline.from_pretrained(runs[1] / "student")
    student("a red circle", height=32, width=32, num_frames=1, num_inference_steps=1, guidance_scale=1.0)


@pytest.mark.slow
def test_the_same_command_resumes_and_a_dry_run_fetches_nothing(
    teachers: dict[str, Path | str], tmp_path: Path
) -> None:
    run = train(tmp_path, teachers["files"], ranks=1, max_steps=1)
    file = recipe_file(tmp_path, teachers["files"], max_steps=2)
    assert "fetch " not in wandistiller("train", "--recipe", file, "--dry_run").stderr
    wandistiller("train", "--recipe", file)
    assert len(losses(run)) == 2
