"""The front matter and the instructions of a model card, by what was exported and of which teacher."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler as Euler
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from huggingface_hub.repocard import metadata_load
from PIL import Image, ImageOps
from published_wan import hub_cache
from ranks import edit_json, write_json

from wandistiller.checkpoint.facts import Facts
from wandistiller.data.media import MediaReader, Size
from wandistiller.export import model_card
from wandistiller.export.formats.diffusers import write_pipeline_card
from wandistiller.export.formats.lora import write_adapter_card
from wandistiller.export.formats.original import original_state, write_original_card
from wandistiller.export.model_card import split_step
from wandistiller.export.output import write_file
from wandistiller.export.source import Source, without_places
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan

ID = "org/wan-finetuned"


def facts(teacher: WanFolder, **more: Any) -> Facts:
    numbers = {"max_steps": 5, "height": 64, "width": 64, "num_frames": 1, "steps": 4, "shift": 3.0}
    texts = {"teacher_path": teacher.name, "init": "teacher", "objective": "velocity"}
    texts |= {"teacher_revision": teacher.revision}
    return Facts(**numbers | texts | {"transformer": teacher.config.raw, "experts": ["transformer"]} | more)


def about(teacher: WanFolder, run: Path, **more: Any) -> Source:
    return Source(run / "checkpoints" / "step_00000005", facts(teacher, **more), {"seed": 0})


def in_call(card: Path) -> str:
    """Return the lines of a card that open and run the pipeline."""
    return card.read_text().split("```python\n")[1].split("```")[0]


@pytest.fixture
def teacher(wan1: Path, copy_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WanFolder:
    """A hub id, opened offline, whose card has a licence; its text names another."""
    folder = copy_of(wan1)
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\nlicense: mit\n"
    )
    hub_cache(tmp_path / "hub", ID, folder, "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return open_wan(ID)


def test_a_student_of_a_hub_id_has_its_licence_and_names_it(teacher: WanFolder, tmp_path: Path) -> None:
    write_pipeline_card(tmp_path, about(teacher, tmp_path), "")
    card = metadata_load(tmp_path / "README.md")
    assert card["base_model"] == [ID] and card["base_model_relation"] == "finetune"
    assert (card["license"], card["license_name"]) == ("other", "own")
    assert card["license_link"] == f"https://huggingface.co/{ID}/blob/main/LICENSE"


def test_a_folder_of_two_parts_that_is_not_here_is_no_base_model_of_the_hub(
    wan1: Path, tmp_path: Path
) -> None:
    """As of a run that is exported on another machine, or from another folder."""
    source = about(open_wan(str(wan1)), tmp_path, teacher_path="models/wan")
    write_pipeline_card(tmp_path, source._replace(recipe={"teacher_path": "models/wan"}), "")
    assert not {"base_model", "license", "license_link"} & metadata_load(tmp_path / "README.md").keys()
    assert "Distilled from `wan`" in (text := (tmp_path / "README.md").read_text())
    assert "models/wan" not in text + (tmp_path / "wandistiller.json").read_text()


@pytest.mark.parametrize(("kind", "key"), [(UniPCMultistepScheduler, "flow_shift"), (Euler, "shift")])
def test_the_card_of_a_lora_sets_the_shift_under_the_key_of_the_teacher_s_scheduler(
    kind: type, key: str, wan1: Path, copy_of: Any, tmp_path: Path
) -> None:
    folder = copy_of(wan1)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True} if key == "flow_shift" else {}
    kind(**flow).save_pretrained(folder / "scheduler")
    edit_json(folder / "model_index.json", scheduler=["diffusers", kind.__name__])
    source = about(open_wan(str(folder)), tmp_path, shift=7.0, teacher_path=str(folder))
    write_adapter_card(tmp_path, source, "", "Rank 4", ["a.safetensors"], comfy="")
    assert f"from_config(pipe.scheduler.config, {key}=7.0)" in in_call(tmp_path / "README.md")


@pytest.mark.parametrize(
    "readme", [None, "# Wan", "---\n- a list\n---\n", "---\na: b: c\n---\n", "---\nlicense: 1\n---\n"]
)
def test_an_unknown_licence_of_the_teacher_becomes_other_as_the_teacher(
    wan1: Path, copy_of: Any, tmp_path: Path, readme: str | None
) -> None:
    folder = copy_of(wan1)
    if readme:
        (folder / "README.md").write_text(readme)
    other = {"license": "other", "license_name": "as-the-teacher"}
    assert model_card.licence(open_wan(str(folder)), "") == {}  # `other` needs a link
    assert model_card.licence(None, "org/wan") == other | {"license_link": "https://huggingface.co/org/wan"}
    (folder / "LICENSE").write_text("terms")
    assert model_card.licence(open_wan(str(folder)), "") == other | {"license_link": "LICENSE"}
    write_pipeline_card(tmp_path, about(open_wan(str(folder)), tmp_path), "")
    assert (tmp_path / "LICENSE").read_text() == "terms"


@pytest.mark.parametrize("link", ["docs/LICENSE", "../LICENSE", "/{here}/LICENSE"])
def test_of_licences_only_a_file_of_the_teacher_s_folder_is_copied_and_into_the_export_alone(
    wan1: Path, copy_of: Any, tmp_path: Path, link: str
) -> None:
    """A link that leads out could publish any file of this machine, or replace one beside the export."""
    folder, link = copy_of(wan1), link.replace("/{here}", str(tmp_path))
    (folder / "docs").mkdir()
    (export := tmp_path / "exports" / "mine").mkdir(parents=True)
    (folder / "docs" / "LICENSE").write_text("terms")
    (folder.parent / "LICENSE").write_text("private")
    (export.parent / "LICENSE").write_text("mine")
    (folder / "README.md").write_text(f"---\nlicense: other\nlicense_link: {link}\n---\n")
    write_pipeline_card(export, about(open_wan(str(folder)), tmp_path), "")
    found = {
        str(file.relative_to(export.parent)): file.read_text() for file in export.parent.rglob("LICENSE")
    }
    said, inside = metadata_load(export / "README.md")["license_link"], link == "docs/LICENSE"
    assert found == {"LICENSE": "mine"} | ({"mine/LICENSE": "terms"} if inside else {})
    assert said == ("LICENSE" if inside else link)


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """A run of 7 steps with checkpoints, pictures and an evaluation; of its last student unless changed."""
    for folder in ("samples", "checkpoints/step_00000005", "checkpoints/step_00000007", "export"):
        (tmp_path / folder).mkdir(parents=True)
    for step in (0, 4, 7):
        (tmp_path / "samples" / f"step_{step:08d}.png").write_text(f"after {step}")
    (tmp_path / "evaluation.md").write_text("# title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nnotes")
    return tmp_path


@pytest.mark.parametrize(("step", "picture"), [(5, "after 4"), (7, "after 7")])
@pytest.mark.parametrize("measured", [5, 7])
def test_the_card_of_a_checkpoint_has_the_picture_up_to_its_step_and_the_figures_of_it_alone(
    measured: int, step: int, picture: str, wan1: Path, evaluated: Path
) -> None:
    write_json(evaluated / "evaluation.json", {"trained_steps": measured})
    source = about(open_wan(str(wan1)), evaluated, max_steps=step)
    source = source._replace(folder=evaluated / "checkpoints" / f"step_{step:08d}")
    write_pipeline_card(evaluated / "export", source, "")
    text = (evaluated / "export" / "README.md").read_text()
    assert (evaluated / "export" / "samples.png").read_text() == picture
    assert ("| 1 | 2 |" in text) == (step == measured)


def test_a_bfloat16_file_opens_with_the_config_beside_its_card(wan1: Path, tmp_path: Path) -> None:
    """Of a shape for which diffusers would take a published Wan's config."""
    teacher = open_wan(str(wan1))
    model = WanTransformer3DModel.from_pretrained(wan1, subfolder="transformer", torch_dtype=torch.bfloat16)
    state = original_state(model.state_dict(), False)
    with ExitStack() as together:
        write_file(tmp_path / "w.safetensors", state, "Wan", "a student", Facts(), together)
    write_original_card(tmp_path, about(teacher, tmp_path), "", ["w.safetensors"], False, "w.card")
    for dtype in (None, torch.bfloat16):
        file = str(tmp_path / "w.safetensors")
        opened = WanTransformer3DModel.from_single_file(file, config=str(tmp_path), torch_dtype=dtype)
        assert {value.dtype for value in opened.parameters()} == {dtype or torch.float32}
        for name, value in opened.named_parameters():
            assert torch.equal(value, model.get_parameter(name).to(value.dtype)), name


@pytest.mark.parametrize("boundary", [0.875, 0.9])
@pytest.mark.parametrize("shift", [3.0, 5.0, 12.0])
@pytest.mark.parametrize("steps", [4, 20, 40])
def test_the_experts_change_where_diffusers_changes_them(shift: float, boundary: float, steps: int) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    scheduler.set_timesteps(steps)
    wanted = sum(t >= boundary * 1000 for t in scheduler.timesteps.tolist())
    assert split_step(Facts(shift=shift, boundary=boundary), steps) == wanted


@pytest.mark.parametrize("fit", [None, "crop", "letterbox"])
def test_images_in_a_card_s_call_are_fitted_as_in_training(fit: str | None, tmp_path: Path) -> None:
    more = {"image_to_video": True, "num_frames": 5, "fit": fit, "background": fit and "#102030"}
    write_pipeline_card(tmp_path, about(open_wan("tiny-i2v"), tmp_path, **more), "")
    noise = torch.randint(256, (100, 200, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    Image.fromarray(noise.numpy()).save(tmp_path / "image.png")
    call = re.search(r"image=(ImageOps.*LANCZOS.*?\)), prompt", in_call(tmp_path / "README.md"))[1]
    names = {"Image": Image, "ImageOps": ImageOps, "load_image": lambda file: Image.open(tmp_path / file)}
    found = eval(call, names)
    wanted = MediaReader(16.0, (16, 32, 48), fit or "crop").read(tmp_path / "image.png", Size(64, 64, 1))
    difference = (torch.from_numpy(np.array(found)).permute(2, 0, 1) / 127.5 - 1 - wanted[:, 0]).abs()
    assert difference.mean() < 0.01  # it scales what is cut out, training cuts what is scaled


def test_what_is_published_names_no_place_on_the_machine() -> None:
    given = {
        "teacher_path": "/home/me/wan",
        "init": "~/students/a",
        "deepspeed_config": {"csv_monitor": {"output_path": "runs/logs/x", "job_name": "a"}},
        "nvme": [{"nvme_path": "/local nvme/me"}],
        "negative_prompt": "/blurry",
        "sample_prompts": ["/imagine a cat"],
        "objective": "velocity",
        "steps": 4,
    }
    assert without_places(given) == given | {
        "teacher_path": "wan",
        "init": "a",
        "deepspeed_config": {"csv_monitor": {"output_path": "x", "job_name": "a"}},
        "nvme": [{"nvme_path": "me"}],
    }
    assert without_places({"teacher_path": ID}) == {"teacher_path": ID}
