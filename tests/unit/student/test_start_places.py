"""Which file the adapters of each network begin with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import recipe
from safetensors.torch import load_file
from styles import style
from torch import Tensor, nn
from trainers import job_of

from wandistiller.config.identity import adapters
from wandistiller.config.job import Job
from wandistiller.experts import Expert
from wandistiller.training.network_builder import NetworkBuilder
from wandistiller.utils.errors import ConfigError

LAYER = "blocks.0.attn1.to_q"
OF_ONE = {"experts": "one"}
OF_HIGH = OF_ONE | {"from_expert": "high_noise"}
TWO = {"experts": "two"}


def job_with(folder: Path, wan: Path, start: Any, student: dict[str, Any]) -> Job:
    given = recipe(folder, wan, output_dir=str(folder / "run"), max_steps=1, student_config=student)
    return job_of(given | {"lora": {"rank": 4, "start": start}})


def change_in(file: Path) -> Tensor:
    state = load_file(file)
    return state[f"transformer.{LAYER}.lora_B.weight"] @ state[f"transformer.{LAYER}.lora_A.weight"]


def change_of(model: nn.Module) -> Tensor:
    return model.get_submodule(LAYER).get_delta_weight("default").detach()


def begun(job: Job) -> list[Tensor]:
    builder = NetworkBuilder(job)
    return [change_of(builder.trainable(expert)) for expert in job.student_experts]


def pair(wan: Path, folder: Path) -> dict[str, str]:
    return {
        side: str(style(wan, folder / f"it_{side}.safetensors", "to_q", seed=n))
        for n, side in enumerate(("high_noise", "low_noise"))
    }


@pytest.mark.parametrize(("student", "side"), [(OF_ONE, "low_noise"), (OF_HIGH, "high_noise")])
def test_one_network_begins_with_the_file_of_the_expert_that_it_is_made_of(
    student: dict[str, Any], side: str, wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    file = pair(wan2, tmp_path)[side]
    for start in ({side: file}, file):
        torch.testing.assert_close(begun(job_with(tmp_path, wan2, start, student)), [change_in(Path(file))])


@pytest.mark.parametrize("student", [OF_ONE, OF_HIGH])
def test_a_folder_of_two_files_begins_each_network_with_its_own(
    student: dict[str, Any], wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    names = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors")
    files = [style(wan2, tmp_path / "two" / name, "to_q", seed=n) for n, name in enumerate(names)]
    high, low = map(change_in, files)
    both = job_with(tmp_path, wan2, str(tmp_path / "two"), TWO)
    torch.testing.assert_close(begun(both), [high, low])
    assert len({*adapters(both)["start"].values()}) == 2
    one = job_with(tmp_path, wan2, str(tmp_path / "two"), student)
    torch.testing.assert_close(begun(one), [high if student is OF_HIGH else low])
    said = job_with(tmp_path, wan2, {"low_noise": str(tmp_path / "two")}, TWO)
    torch.testing.assert_close(begun(said), [torch.zeros_like(low), low])


@pytest.mark.parametrize(
    ("student", "key", "text"),
    [
        (TWO, "", 'the student has the high-noise expert too. Write {"low_noise": '),
        (OF_HIGH, "", 'the student is made of the high-noise expert alone. Write {"high_noise": '),
        (OF_HIGH, "low_noise", 'is made of the low-noise expert. Leave it out, or write "high_noise"'),
        (OF_ONE, "both", 'is made of the high-noise expert. Leave it out, or write "low_noise"'),
    ],
)
def test_a_file_of_an_expert_for_another_network_is_refused_with_what_to_write(
    student: dict[str, Any], key: str, text: str, wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    files = pair(wan2, tmp_path)
    start = {"": files["low_noise"], "both": files}.get(key, {key: files["low_noise"]})
    with pytest.raises(ConfigError) as raised:
        job_with(tmp_path, wan2, start, student)
    (problem,) = raised.value.problems
    assert problem.startswith("recipe: `lora.start") and text in problem


def test_a_teacher_of_one_network_takes_a_file_of_any_name_and_no_low_noise_expert_s(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    file = pair(wan1, tmp_path)["low_noise"]
    for start in (file, {"high_noise": file}):
        torch.testing.assert_close(begun(job_with(tmp_path, wan1, start, {})), [change_in(Path(file))])
    with pytest.raises(ConfigError, match="no network of the student is made of the low-noise expert"):
        job_with(tmp_path, wan1, {"low_noise": file}, {})


def test_one_file_for_both_networks_counts_by_its_content_for_each(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    file = style(wan2, tmp_path / "style.safetensors", "to_q")
    for student in (TWO, OF_ONE):
        start = adapters(job_with(tmp_path, wan2, str(file), student))["start"]
        assert start.keys() == {e.value for e in Expert} and len({*start.values()}) == 1
