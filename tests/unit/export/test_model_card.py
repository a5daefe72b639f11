"""The front matter and the instructions of a model card, by what was exported and of which teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from published_wan import hub_cache

from wandistiller.export import model_card
from wandistiller.export.formats.diffusers import write_pipeline_card
from wandistiller.export.formats.lora import write_adapter_card
from wandistiller.export.formats.original import original_state, write_original_card
from wandistiller.export.output import write_file
from wandistiller.export.source import Source
from wandistiller.wan.pipeline import WanFolder, open_wan

ID = "org/wan-finetuned"


def facts(teacher: WanFolder) -> dict[str, Any]:
    numbers = {"max_steps": 5, "height": 64, "width": 64, "num_frames": 1, "steps": 4, "shift": 3.0}
    return numbers | {
        "teacher_path": teacher.name,
        "transformer": teacher.config,
        "experts": ["transformer"],
        "init": "teacher",
        "objective": "velocity",
    }


def about(teacher: WanFolder, run: Path) -> Source:
    return Source(run / "checkpoints" / "step_00000005", facts(teacher), {"seed": 0})


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


def test_a_lora_is_an_adapter_of_its_teacher_whatever_that_is_called(
    teacher: WanFolder, tmp_path: Path
) -> None:
    write_adapter_card(tmp_path, about(teacher, tmp_path), "", "Rank 4", ["a.safetensors"], comfy=True)
    card = metadata_load(tmp_path / "README.md")
    assert (card["base_model"], card["base_model_relation"]) == ([ID], "adapter")
    assert "`models/loras`" in (tmp_path / "README.md").read_text()


def test_a_student_of_the_embedded_teacher_has_the_licence_of_this_package(tmp_path: Path) -> None:
    write_pipeline_card(tmp_path, about(open_wan("tiny"), tmp_path), "")
    card = metadata_load(tmp_path / "README.md")
    assert card["license"] == "apache-2.0" and "base_model" not in card


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
    assert model_card.licence(open_wan(str(folder)), "") == other
    assert model_card.licence(None, "org/wan")["license_link"] == "https://huggingface.co/org/wan"


@pytest.mark.parametrize("form", ["pipeline", "original", "lora"])
@pytest.mark.parametrize(("repository", "where"), [("", "THIS_FOLDER"), ("org/student", "org/student")])
def test_every_form_has_recipe_picture_tables_and_how_to_run_it(
    teacher: WanFolder, tmp_path: Path, form: str, repository: str, where: str
) -> None:
    run, folder = tmp_path / "run", tmp_path / "export"
    (run / "samples").mkdir(parents=True)
    folder.mkdir()
    (run / "samples" / "step_00000005.png").write_bytes(b"a picture")
    (run / "evaluation.md").write_text("# title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nnotes")
    source, files = about(teacher, run), ["w.safetensors"]
    if form == "pipeline":
        call = f'from_pretrained("{where}"'
        write_pipeline_card(folder, source, repository)
    elif form == "original":
        call = f'w.safetensors", config="{where}")'
        write_original_card(folder, source, repository, files, eight_bits=False)
    else:
        call = f'load_lora_weights("{where}", weight_name="w.safetensors"'
        write_adapter_card(folder, source, repository, "Rank 4", files, comfy=False)
    text = ModelCard.load(folder / "README.md").text
    for words in ('"seed": 0', "![samples](samples.png)", "| 1 | 2 |", call):
        assert words in text, words
    assert (folder / "samples.png").read_bytes() == b"a picture" and (folder / "wandistiller.json").is_file()


def test_a_bfloat16_file_opens_with_the_config_beside_its_card(wan1: Path, tmp_path: Path) -> None:
    """Of a shape for which diffusers would take a published Wan's config."""
    teacher = open_wan(str(wan1))
    model = WanTransformer3DModel.from_pretrained(wan1, subfolder="transformer", torch_dtype=torch.bfloat16)
    write_file(tmp_path / "w.safetensors", original_state(model.state_dict(), False), "Wan", "a student", {})
    write_original_card(tmp_path, about(teacher, tmp_path), "", ["w.safetensors"], eight_bits=False)
    for dtype in (None, torch.bfloat16):
        file = str(tmp_path / "w.safetensors")
        opened = WanTransformer3DModel.from_single_file(file, config=str(tmp_path), torch_dtype=dtype)
        assert {value.dtype for value in opened.parameters()} == {dtype or torch.float32}
        for name, value in opened.named_parameters():
            assert torch.equal(value, model.get_parameter(name).to(value.dtype)), name


def test_eight_bits_are_for_comfyui_alone(teacher: WanFolder, tmp_path: Path) -> None:
    write_original_card(tmp_path, about(teacher, tmp_path), "", ["w.safetensors"], eight_bits=True)
    text = (tmp_path / "README.md").read_text()
    assert "`models/diffusion_models`" in text and ".comfy_quant" in text and "from_single_file" not in text
