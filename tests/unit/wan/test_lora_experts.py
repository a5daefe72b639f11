"""Which expert of a Wan a LoRA file is for: as its name, its folder or its header says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wandistiller.experts import Expert
from wandistiller.wan.lora_experts import adapters_of, expert_of, facts_of, files_of, unclear_problems

HIGH, LOW = Expert.HIGH_NOISE, Expert.LOW_NOISE
OF_NO_EXPERT = [
    "slow_motion",
    "low_poly",
    "style_high_quality_v2",
    "Highland",
    "flowers",
    "high_low_mix",
    "high_noise_and_low_noise",
    "pytorch_lora_weights",
]
UNCLEAR = ["high_heels", "low_rise_jeans", "high_school_uniform", "high_fashion_v2", "low_step_4", "high5"]


def file_in(folder: Path, name: str, metadata: dict[str, str] | None = None) -> Path:
    file = folder / f"{name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.zeros(1)}, file, metadata)
    return file


@pytest.mark.parametrize(
    "name",
    [
        "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise",
        "Wan22-Lightning_T2V-A14B-4steps-lora_{}_fp16",
        "Wan22_A14B_T2V_{}_Lightning_4steps_lora_250928_rank128_fp16",
        "{}/model",
        "my lora {}_noise/model",
        "{}_noise_model",
        "style_{}_v2",
        "style-{}Noise-e20",
        "style_{}-noise",
        "my_{}.noise",
        "lora_{}_noise_000001000",
        "Wan2.2-T2V-Low_Res_{}_noise",
        "{}/low_poly",
    ],
)
def test_a_word_between_separators_in_a_file_s_or_its_folder_s_name_names_the_expert(
    name: str, tmp_path: Path
) -> None:
    for side, expert in (("high", HIGH), ("HIGH", HIGH), ("low", LOW), ("Low", LOW)):
        assert expert_of(file_in(tmp_path / "loras", name.format(side))) is expert


@pytest.mark.parametrize("name", OF_NO_EXPERT)
def test_other_words_name_no_expert(name: str, tmp_path: Path) -> None:
    assert expert_of(file_in(tmp_path / "low_lr", name)) is None


def test_a_file_s_own_name_goes_before_its_folder_s(tmp_path: Path) -> None:
    assert expert_of(file_in(tmp_path / "high", "style_low_v2")) is LOW


def test_a_pipeline_s_folder_is_of_no_expert_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "high" / "wan_high_noise").mkdir(parents=True)
    assert expert_of(tmp_path / "high" / "wan_high_noise") is None


def test_two_files_in_a_folder_for_diffusers_are_the_experts_in_their_order(tmp_path: Path) -> None:
    first = file_in(tmp_path, "pytorch_lora_weights")
    assert files_of(tmp_path) == [first] and expert_of(first) is None
    second = file_in(tmp_path, "pytorch_lora_weights_2")
    assert files_of(tmp_path) == [first, second]
    assert [expert_of(first), expert_of(second)] == [HIGH, LOW]
    assert files_of(tmp_path, LOW) == [second] and files_of(tmp_path, HIGH) == [first]


def test_the_facts_of_a_run_say_that_its_one_network_is_of_the_low_noise_expert(tmp_path: Path) -> None:
    facts = {"bases": ["transformer_2"], "steps": 4}
    by_header = file_in(tmp_path, "lora", {"wandistiller": json.dumps(facts)})
    in_folder = file_in(tmp_path / "folder", "pytorch_lora_weights")
    (tmp_path / "folder" / "wandistiller.json").write_text(json.dumps(facts))
    for file in (by_header, in_folder):
        assert facts_of(file) == facts and expert_of(file) is LOW


def test_a_file_of_others_and_one_that_is_not_there_have_no_facts(tmp_path: Path) -> None:
    others = file_in(tmp_path, "others", {"wandistiller": "[1, 2"})
    assert [facts_of(file) for file in (others, file_in(tmp_path, "x"), tmp_path / "away")] == [{}, {}, {}]


@pytest.mark.parametrize("name", UNCLEAR)
def test_a_word_that_may_be_an_expert_is_asked_for(name: str, tmp_path: Path) -> None:
    file = file_in(tmp_path, name)
    assert expert_of(file) is None
    (problem,) = unclear_problems("recipe", [file], "{expert}={file}")
    assert f"Write {name[:4].rstrip('5_')}_noise={file} if it is for that one alone, or beside it" in problem


def test_the_other_expert_s_file_beside_it_says_that_such_a_word_is_its_expert(tmp_path: Path) -> None:
    files = [file_in(tmp_path, f"Wan22-{side}-my_style") for side in ("HIGH", "low")]
    assert [expert_of(file) for file in files] == [HIGH, LOW]


def test_a_run_of_the_high_noise_expert_alone_made_a_lora_of_that(tmp_path: Path) -> None:
    of_two = {"wandistiller": json.dumps({"bases": ["transformer"], "boundary": 0.875})}
    of_one = {"wandistiller": json.dumps({"bases": ["transformer"], "boundary": None})}
    found = [expert_of(file_in(tmp_path / "x", f"x{n}", facts)) for n, facts in enumerate((of_two, of_one))]
    assert found == [HIGH, None]


def test_of_a_run_s_two_files_the_wanted_expert_s_is_meant(tmp_path: Path) -> None:
    files = [file_in(tmp_path, f"lora_{expert.key}") for expert in Expert]
    (tmp_path / "lora.card").mkdir()
    (tmp_path / "lora.card" / "wandistiller.json").write_text("{}")
    assert files_of(tmp_path) == adapters_of(tmp_path) == files
    assert [files_of(tmp_path, expert) for expert in Expert] == [[file] for file in files]
