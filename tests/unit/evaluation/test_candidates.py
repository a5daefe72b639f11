"""The pipelines that the command line names: which LoRA file is added to which of their networks."""

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from drawing import GPU
from published_wan import hub_cache
from safetensors.torch import load_file
from styles import WEIGHTS, style, with_style
from torch import Tensor

from wandistiller.evaluation.candidates import read_candidate
from wandistiller.experts import Expert
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.added_lora import added_changes
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.hub import CONFIG_FILES
from wandistiller.wan.lora_experts import adapters_of

LAYER = "blocks.0.attn1.to_q"
FEW = {"shift": 5.0, "steps": 2, "few_steps": [1.0, 0.5], "sampler": "euler"}


def pair(wan: Path, folder: Path, name: str) -> tuple[Path, Path]:
    high, low = (folder / f"{name.format(side)}.safetensors" for side in ("HIGH", "LOW"))
    return style(wan, high, "to_q", seed=1), style(wan, low, "to_q", seed=2)


def change_in(file: Path) -> Tensor:
    state = load_file(file)
    return state[f"transformer.{LAYER}.lora_B.weight"] @ state[f"transformer.{LAYER}.lora_A.weight"]


def changes(folder: WanFolder) -> list[Tensor]:
    found = (added_changes(folder.added, folder.config, expert)[LAYER] for expert in Expert)
    return [b @ a for a, b in found]


def test_each_of_two_experts_takes_the_file_of_its_name(wan2: Path, tmp_path: Path) -> None:
    files = pair(wan2, tmp_path, "lora_{}_fp16")
    found = changes(read_candidate(str(wan2), [str(file) for file in files]).folder)
    torch.testing.assert_close(found, [change_in(file) for file in files])


def test_a_folder_of_two_files_for_diffusers_is_added_file_by_expert_with_its_facts(
    wan2: Path, tmp_path: Path
) -> None:
    names = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors")
    files = [style(wan2, tmp_path / "ours" / name, "to_q", seed=n) for n, name in enumerate(names)]
    (tmp_path / "ours" / "wandistiller.json").write_text(json.dumps(FEW))
    wanted = [change_in(file) for file in files]
    for words in ([str(tmp_path / "ours")], [str(file) for file in files]):
        candidate = read_candidate(str(wan2), words)
        torch.testing.assert_close(changes(candidate.folder), wanted)
        assert candidate.facts.few_steps and candidate.facts.steps == 2


def test_two_styles_are_added_to_both_experts(wan2: Path, tmp_path: Path) -> None:
    files = [style(wan2, tmp_path / f"{n}.safetensors", "to_q", seed=i) for i, n in enumerate("ab")]
    wanted = sum(change_in(file) for file in files)
    found = changes(read_candidate(str(wan2), [f"both={file}" for file in files]).folder)
    torch.testing.assert_close(found, [wanted, wanted])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("base", "strange"), [("transformer", False), ("transformer_2", True)])
def test_the_file_of_a_run_of_one_network_is_drawn_as_that_network_alone(
    base: str, strange: bool, wan2: Path, tmp_path: Path
) -> None:
    """Of the teacher's other network nothing is loaded; the low-noise one says itself which it is."""
    facts = {"bases": [base], "teacher_path": "elsewhere" if strange else str(wan2)}
    file = style(wan2, tmp_path / "lora.safetensors", "to_q", metadata={"wandistiller": json.dumps(facts)})
    candidate = read_candidate(str(wan2), [str(file)])
    networks = build_teacher(candidate.folder, GPU).experts
    merged = with_style(wan2, tmp_path / "merged", (file, 1.0), experts=(base,))
    wanted = load_file(merged / base / WEIGHTS)[f"{LAYER}.weight"]
    assert len({*networks.values()}) == 1 and candidate.folder.boundary is None
    module = networks[Expert.HIGH_NOISE].module
    torch.testing.assert_close(module.get_parameter(f"{LAYER}.weight").detach(), wanted)


def test_the_file_of_one_network_may_be_said_for_one_of_two(wan2: Path, tmp_path: Path) -> None:
    facts = {"wandistiller": json.dumps({"bases": ["transformer_2"]})}
    file = style(wan2, tmp_path / "lora.safetensors", "to_q", metadata=facts)
    folder = read_candidate(str(wan2), [f"high_noise={file}"]).folder
    assert len(folder.configs) == 2 and not added_changes(folder.added, folder.config, Expert.LOW_NOISE)


@pytest.mark.parametrize(
    ("init", "before", "base"),
    [("full", ["velocity: 5 steps"], "full/student"), ("teacher", None, "a student of 2 layers")],
    ids=["of a run", "of fewer layers"],
)
def test_a_file_for_what_its_run_began_with_needs_a_pipeline(
    init: str, before: list[str] | None, base: str, wan1: Path, tmp_path: Path
) -> None:
    facts = {"lora": {"rank": 4}, "init": init, "before": before, "teacher_path": str(wan1)}
    config = json.loads((wan1 / "transformer" / "config.json").read_text()) | {"num_layers": 2}
    made = {"wandistiller": json.dumps(facts | {"transformer": config})}
    file = style(wan1, tmp_path / "lora.safetensors", "to_q", metadata=made)
    with pytest.raises(ConfigError, match=f"its adapters are for {base}, not for .* with --model"):
        read_candidate(None, [str(file)])
    assert len(read_candidate(str(wan1), [str(file)]).folder.added) == 1


@pytest.mark.parametrize(
    ("experts", "names"),
    [
        (["transformer"], ["lora.safetensors"]),
        (["transformer", "transformer_2"], ["lora_high_noise.safetensors", "lora_low_noise.safetensors"]),
    ],
    ids=["one", "two"],
)
def test_of_a_run_s_folder_only_the_files_that_it_ended_with_are_taken(
    experts: list[str], names: list[str], tmp_path: Path
) -> None:
    for name in (*names, "lora_high_noise_backup.safetensors", "lora_step350.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "lora.card").mkdir()
    (tmp_path / "lora.card" / "wandistiller.json").write_text(json.dumps({"experts": experts}))
    assert [file.name for file in adapters_of(tmp_path)] == names


def test_a_student_on_the_hub_is_sampled_as_its_run_says(
    wan1: Path, copy_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(wan1)
    (folder / "wandistiller.json").write_text(json.dumps(FEW | {"num_frames": 9}))
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        if not any(fnmatchcase(str(file.relative_to(folder)), one) for one in CONFIG_FILES):
            file.unlink()  # only these are fetched
    hub_cache(tmp_path / "hub", "me/student", folder, "main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    facts = read_candidate("me/student").facts
    assert (facts.few_steps, facts.num_frames) == (FEW["few_steps"], 9)


@pytest.mark.parametrize("teacher", ["models/wan", "wan"])
def test_a_teacher_in_a_folder_that_is_not_here_is_not_looked_for_on_the_hub(
    teacher: str, wan1: Path, tmp_path: Path
) -> None:
    """A hub id has its commit; a run that was started in another folder has none."""
    made = {"wandistiller": json.dumps(FEW | {"teacher_path": teacher})}
    file = style(wan1, tmp_path / "lora.safetensors", "to_q", metadata=made)
    wanted = f'`teacher_path` is "{teacher}". No such folder is here: .* --teacher_path .* --model'
    with pytest.raises(ConfigError, match=wanted):
        _ = read_candidate(None, [str(file)]).folder


def test_one_file_as_a_pipeline_is_refused_with_the_flag_that_takes_it(wan1: Path, tmp_path: Path) -> None:
    file = style(wan1, tmp_path / "lora.safetensors", "to_q")
    with pytest.raises(ConfigError, match="is one file, not a pipeline. Give a LoRA by --lora"):
        read_candidate(str(file))


def test_a_run_without_adapters_is_no_lora(wan1: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "resolved").mkdir(parents=True)
    (tmp_path / "run" / "resolved" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="without a LoRA. .*export --adapter .*else give it as the model"):
        read_candidate(str(wan1), [str(tmp_path / "run")])
