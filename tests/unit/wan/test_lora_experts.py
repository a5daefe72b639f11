"""The files that a LoRA's name means, and the expert of a Wan that each is for, as names and headers say."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError, Place
from wandistiller.wan.lora_experts import adapters_of, expert_of, facts_of, files_of, sides_of

HIGH, LOW = Expert.HIGH_NOISE, Expert.LOW_NOISE
KEY = "{}.blocks.0.attn1.to_q.lora_A.weight"
NAMES = [
    "wan2.2_t2v_lightx2v_4steps_lora_v1.1_{}_noise",
    "Wan22_A14B_T2V_{}_Lightning_4steps_lora_250928_rank128_fp16",
    "{}/model",
    "my lora {}_noise/model",
    "style-{}Noise-e20",
    "mystyle{}Noise",
]
OF_NO_EXPERT = ["slow_motion", "Highland", "flowers", "high_low_mix", "pytorch_lora_weights", "style_hi"]


def file_in(folder: Path, name: str, metadata: dict[str, str] | None = None, *keys: str) -> Path:
    file = folder / f"{name}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: torch.zeros(1) for key in keys or ("a",)}, file, metadata)
    return file


@pytest.mark.parametrize("name", NAMES)
def test_the_word_high_or_low_in_a_file_s_or_else_its_folder_s_name_names_the_expert(
    name: str, tmp_path: Path
) -> None:
    for side, expert in (("High", HIGH), ("HIGH", HIGH), ("Low", LOW)):
        assert expert_of(file_in(tmp_path / "loras", name.format(side))) is expert


@pytest.mark.parametrize("name", OF_NO_EXPERT)
def test_other_words_name_no_expert(name: str, tmp_path: Path) -> None:
    assert expert_of(file_in(tmp_path / "loras", name)) is None


def test_a_file_s_own_name_goes_before_its_folder_s(tmp_path: Path) -> None:
    assert expert_of(file_in(tmp_path / "high", "style_low_v2")) is LOW


def test_two_files_in_a_folder_for_diffusers_are_the_experts_in_their_order(tmp_path: Path) -> None:
    first = file_in(tmp_path / "it", "pytorch_lora_weights")
    assert files_of(str(tmp_path / "it")) == [first] and expert_of(first) is None
    second = file_in(tmp_path / "it", "pytorch_lora_weights_2")
    assert files_of(str(tmp_path / "it")) == [first, second]
    assert [expert_of(first), expert_of(second)] == [HIGH, LOW]
    assert [files_of(str(tmp_path / "it"), e.key) for e in Expert] == [[first], [second]]


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


def test_a_run_of_the_high_noise_expert_alone_made_a_lora_of_that(tmp_path: Path) -> None:
    of_two = {"wandistiller": json.dumps({"bases": ["transformer"], "boundary": 0.875})}
    of_one = {"wandistiller": json.dumps({"bases": ["transformer"], "boundary": None})}
    found = [expert_of(file_in(tmp_path / "x", f"x{n}", facts)) for n, facts in enumerate((of_two, of_one))]
    assert found == [HIGH, None]


def test_of_a_run_s_two_files_the_wanted_expert_s_is_meant(tmp_path: Path) -> None:
    files = [file_in(tmp_path, f"lora_{expert.key}") for expert in Expert]
    (tmp_path / "lora.card").mkdir()
    (tmp_path / "lora.card" / "wandistiller.json").write_text("{}")
    assert files_of(str(tmp_path)) == adapters_of(tmp_path) == files
    assert [files_of(str(tmp_path), expert.key) for expert in Expert] == [[file] for file in files]


@pytest.mark.parametrize(
    "names",
    [["adapter_model"], ["only"], ["high_noise_model", "low_noise_model"]],
    ids=["peft", "one", "pair"],
)
def test_a_folder_of_peft_of_one_file_or_of_a_published_pair_is_read(
    names: list[str], tmp_path: Path
) -> None:
    files = [file_in(tmp_path / "it", name) for name in names]
    assert files_of(str(tmp_path / "it")) == files


@pytest.mark.parametrize("names", [["a", "b"], ["high", "low", "low_2"], []])
def test_of_other_folders_the_file_is_asked_for(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    for name in names:
        file_in(tmp_path / "it", name)
    with pytest.raises(ConfigError, match=r"it: is a folder with .*\. Name the LoRA file"):
        files_of(str(tmp_path / "it"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("https://huggingface.co/org/it/resolve/main/it.safetensors", "is an address. Fetch the file"),
        ("lightx2v/Wan2.2-Lightning", "`hf download lightx2v/Wan2.2-Lightning --include"),
        ("away.safetensors", "no such file. Fix the path, or put it back; start all commands"),
    ],
)
def test_a_name_that_is_no_file_is_refused_with_what_to_do(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        files_of(name)
    assert str(raised.value).startswith(f"{name}: ") and text in str(raised.value)


def test_a_file_that_names_no_expert_is_refused_for_two_with_the_three_spellings(tmp_path: Path) -> None:
    files = [file_in(tmp_path / "x", name) for name in ("style_hi", "style_lo")]
    with pytest.raises(ConfigError) as raised:
        sides_of(Place("recipe"), [(file, "") for file in files], 2)
    assert len(raised.value.problems) == 2
    for file, problem in zip(files, raised.value.problems, strict=True):
        assert problem.endswith(f"Write high_noise={file}, low_noise={file}, or both={file} for both.")
    assert sides_of(Place("recipe"), [(file, "") for file in files], 1) == ["", ""]


def test_what_is_written_goes_before_the_name_and_a_file_of_both_experts_says_it_itself(
    tmp_path: Path,
) -> None:
    low = file_in(tmp_path, "low")
    both = file_in(tmp_path, "x", None, KEY.format("transformer"), KEY.format("transformer_2"))
    second = file_in(tmp_path, "y", None, KEY.format("transformer_2"))
    said = [(low, ""), (low, "both"), (low, "high_noise"), (both, ""), (both, "low_noise"), (second, "")]
    assert sides_of(Place("recipe"), said, 2) == [
        "low_noise",
        "both",
        "high_noise",
        "both",
        "low_noise",
        "low_noise",
    ]


@pytest.mark.parametrize("files", [("high", "low"), ("both",)])
def test_files_of_two_experts_are_refused_for_one_network(files: tuple[str, ...], tmp_path: Path) -> None:
    keys = (KEY.format("transformer"), KEY.format("transformer_2"))
    said = [(file_in(tmp_path, name, None, *(keys if name == "both" else ())), "") for name in files]
    with pytest.raises(ConfigError, match="are for two experts, and here is one network"):
        sides_of(Place("recipe"), said, 1)
