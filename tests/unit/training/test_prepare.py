"""What a run keeps of its teacher, and what its pictures are of, before anything is trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_wans import A14B, Wans
from ranks import edit_json
from recipes import recipe

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
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


@pytest.fixture(scope="module")
def wans(tmp_path_factory: pytest.TempPathFactory) -> Wans:
    return Wans(tmp_path_factory.mktemp("prepare"))


def rows(wans: Wans, name: str, *given: dict[str, str]) -> str:
    file = wans.data.with_name(name)
    file.write_text("\n".join(map(json.dumps, given)))
    return str(file)


def job_of(wans: Wans, **more: Any) -> Any:
    return read_job(RunConfig(**recipe(wans.folder, wans[A14B], **wans.settings(A14B, **more))), 1)


@pytest.mark.usefixtures("one_rank")
def test_every_prompt_with_the_same_image_has_its_picture(wans: Wans) -> None:
    prompts = ["a red circle", "a blue square", "left"]
    data = rows(wans, "same.jsonl", *({"prompt": prompt, "image": "0.png"} for prompt in prompts))
    job = job_of(wans, data_path=data, sample_prompts=prompts, objective={"name": "dmd2", "steps": 2})
    assert [item.prompt for item in prepare(job)[0].sample_items] == prompts
