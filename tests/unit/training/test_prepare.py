"""What a run keeps of its teacher, and what its pictures are of, before anything is trained."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
from diffusers import AutoencoderKLWan
from image_data import image_data, noise
from image_wans import A14B, Wans
from ranks import edit_json
from recipes import recipe
from slow_cases import slow_but
from transformers import UMT5EncoderModel

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.data.tensor_cache import Sample
from wandistiller.training.pictures import PictureDrawer
from wandistiller.training.prepare import _teacher_fingerprint, prepare


def test_only_a_teacher_that_samples_in_another_way_has_another_cache(
    tmp_path: Path, wan2: Path, copy_of: Callable[..., Path]
) -> None:
    folder = copy_of(wan2, weights=True)
    index, scheduler = folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"

    def of_teacher() -> str:
        return _teacher_fingerprint(read_job(RunConfig(**recipe(tmp_path, folder)), 1), "text")

    first = of_teacher()
    edit_json(scheduler, flow_shift=7.0, _diffusers_version="0.43.0")  # the cache knows a run by its shift
    assert of_teacher() == first
    found = [first]
    for file, change in (
        (index, {"boundary_ratio": 0.5}),
        (scheduler, {"solver_order": 3}),
        (scheduler, {"_class_name": "FlowMatchEulerDiscreteScheduler"}),
    ):
        edit_json(file, **change)
        if name := change.get("_class_name"):
            edit_json(index, scheduler=["diffusers", name])
        found.append(of_teacher())
    assert len(set(found)) == 4


def encoders() -> set[int]:
    """Text encoders and VAEs in this process."""
    gc.collect()
    return {id(o) for o in gc.get_objects() if isinstance(o, (UMT5EncoderModel, AutoencoderKLWan))}


@pytest.mark.usefixtures("one_rank")
def test_no_text_encoder_and_no_vae_is_left_when_all_is_prepared(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, data_path=str(image_data(tmp_path)), output_dir=str(tmp_path / "run"))
    job, before = trainers.job_of(given), encoders()
    _ = trainers.parts_of(job)
    assert encoders() <= before


@pytest.fixture(scope="module")
def wans(tmp_path_factory: pytest.TempPathFactory) -> Wans:
    return Wans(tmp_path_factory.mktemp("prepare"))


def rows(wans: Wans, name: str, *given: dict[str, str]) -> str:
    file = wans.data.with_name(name)
    file.write_text("\n".join(map(json.dumps, given)))
    return str(file)


def job_of(wans: Wans, **more: Any) -> Any:
    given = recipe(wans.folder, wans[A14B], **wans.settings(A14B, **more))
    return read_job(RunConfig(**{"output_dir": str(wans.folder / "run")} | given), 1)


@pytest.mark.usefixtures("one_rank")
def test_every_prompt_with_the_same_image_has_its_picture(wans: Wans) -> None:
    prompts = ["a red circle", "a blue square", "left"]
    data = rows(wans, "same.jsonl", *({"prompt": prompt, "image": "0.png"} for prompt in prompts))
    job = job_of(wans, data_path=data, sample_prompts=prompts, objective={"name": "dmd2", "steps": 2})
    assert [item.prompt for item in prepare(job)[0].sample_items] == prompts


def test_prompts_of_pictures_are_cleaned_as_those_of_the_data(wans: Wans) -> None:
    written, cleaned = "she’s turning  &amp; left", "she's turning & left"
    given = [{"prompt": written, "image": "0.png"}, {"prompt": "a", "image": "1.png"}]
    data = rows(wans, "written.jsonl", *given)
    job = job_of(wans, data_path=data, sample_prompts=[written])
    assert [item.prompt for item in job.sample_items] == job.run.sample_prompts == [cleaned]


@pytest.mark.usefixtures("one_rank")
def test_the_teacher_s_clips_of_pictures_are_those_of_the_run_s_size(wans: Wans) -> None:
    """Of two pictures: a wide one as the run's clips, and a tall one in a bucket of its own."""
    for name, shape in {"wide": (80, 40), "tall": (40, 80)}.items():
        noise(0)[0].resize(shape).save(wans.data.with_name(f"{name}.png"))
    data = rows(wans, "two.jsonl", *({"prompt": "left", "image": f"{n}.png"} for n in ("wide", "tall")))
    more = {"sample_prompts": None, "objective": "trajectory", "buckets": [[32, 64], [64, 32]]}
    job = job_of(wans, data_path=data, rollout_steps=3, **more)
    made, _, _ = prepare(job)
    wide, tall = made.sample_items
    assert [made.has_rollouts(items, job.size) for items in ([wide], [tall], [wide, tall])] == [
        True,
        False,
        False,
    ]
    assert made.x0_of([wide], job.size).shape[1:] == job.folder.latent_shape(32, 64, 5)


@pytest.mark.usefixtures("one_rank")
def test_a_video_is_no_sample_of_the_teacher(wans: Wans) -> None:
    data = rows(
        wans, "both.jsonl", {"prompt": "left", "image": "0.png"}, {"prompt": "top", "video": "clip.gif"}
    )
    job = job_of(wans, data_path=data, sample_prompts=None, objective="velocity", rollout_steps=1)
    made, _, _ = prepare(job)
    assert [made.has_rollouts([item], job.size) for item in made.sample_items] == [True, False]


@pytest.mark.parametrize("change", slow_but([os.remove], [os.utime, os.remove]))
@pytest.mark.usefixtures("one_rank")
def test_a_run_goes_on_when_a_file_of_its_data_changes(
    wans: Wans, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    data = image_data(tmp_path, pictures=1)
    job = job_of(wans, data_path=str(data), cache_dir=str(tmp_path / "cache"), sample_prompts=None)
    made, conditions, _ = prepare(job)
    drawer, (item, _) = PictureDrawer(job, made, conditions, None, None), made.sample_items

    def found() -> list[torch.Tensor]:
        given = conditions.of([Sample(item, job.size)])
        return [given.joined_BCFHW, made.x0_of([item], job.size), drawer._beginnings["given"].stills]

    before = found()
    change(item.image)
    assert all(map(torch.equal, before, found()))
    missing = PictureDrawer(job, made, conditions, None, None)._beginnings
    assert [*missing] == ["given"] * item.image.exists()
