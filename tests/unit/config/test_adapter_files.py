"""Which file the adapters of each network begin with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from recipes import SHARDED, recipe
from safetensors.torch import load_file, save_file
from styles import style
from torch import Tensor, nn
from trainers import job_of

from wandistiller.batch import STUDENT
from wandistiller.config.identity import adapters
from wandistiller.config.job import Job
from wandistiller.config.summary import summary
from wandistiller.experts import Expert
from wandistiller.training.build_student import NetworkBuilder
from wandistiller.utils.errors import ConfigError

LAYER = "blocks.0.attn1.to_q"
OF_ONE = {"experts": "one"}
OF_HIGH = OF_ONE | {"from_expert": "high_noise"}
TWO = {"experts": "two"}


def job_with(folder: Path, wan: Path, start: Any, student: dict[str, Any]) -> Job:
    """A run of adapters on weights of its own."""
    given = recipe(folder, wan, output_dir=str(folder / "run"), max_steps=1, student_config=student)
    return job_of(given | {"lora": {"rank": 4, "start": start}, "teacher_deepspeed_config": SHARDED})


def refusal(folder: Path, wan: Path, start: Any, student: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        job_with(folder, wan, start, student)
    (problem,) = raised.value.problems
    return problem


def change_in(file: Path, expert: str = "transformer") -> Tensor:
    state = load_file(file)
    return state[f"{expert}.{LAYER}.lora_B.weight"] @ state[f"{expert}.{LAYER}.lora_A.weight"]


def change_of(model: nn.Module) -> Tensor:
    return model.get_submodule(LAYER).get_delta_weight("default").detach()


def begun(job: Job) -> list[Tensor]:
    builder = NetworkBuilder(job)
    return [change_of(network.module) for network in builder.networks(STUDENT).values()]


def pair(wan: Path, folder: Path) -> dict[str, str]:
    return {
        side: str(style(wan, folder / f"it_{side}.safetensors", "to_q", seed=n))
        for n, side in enumerate(("high_noise", "low_noise"))
    }


@pytest.mark.parametrize(("student", "side"), [(OF_ONE, "low_noise"), (OF_HIGH, "high_noise")])
def test_one_network_begins_with_the_file_of_the_expert_that_it_is_made_of(
    student: dict[str, Any], side: str, wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    files = pair(wan2, tmp_path)
    file = files[side]
    for start in (files, {side: file}, file, f"{side}={file}", [f"{side}={file}"]):
        torch.testing.assert_close(begun(job_with(tmp_path, wan2, start, student)), [change_in(Path(file))])


def test_one_file_begins_the_network_of_its_expert_alone_and_the_start_says_so(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    low = pair(wan2, tmp_path)["low_noise"]
    job = job_with(tmp_path, wan2, low, TWO)
    wanted = change_in(Path(low))
    torch.testing.assert_close(begun(job), [torch.zeros_like(wanted), wanted])
    assert f"start     {low}, strength 1, on the low-noise expert" in summary(job)


def test_a_folder_of_two_files_begins_each_network_with_its_own(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    names = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors")
    files = [style(wan2, tmp_path / "two" / name, "to_q", seed=n) for n, name in enumerate(names)]
    high, low = map(change_in, files)
    both = job_with(tmp_path, wan2, str(tmp_path / "two"), TWO)
    torch.testing.assert_close(begun(both), [high, low])
    assert len({*adapters(both)["start"].values()}) == 2
    for student, own in ((OF_ONE, low), (OF_HIGH, high)):
        torch.testing.assert_close(begun(job_with(tmp_path, wan2, str(tmp_path / "two"), student)), [own])


@pytest.mark.parametrize("side", ["low_noise", "high_noise"])
def test_a_file_for_an_expert_that_no_network_is_made_of_is_refused(
    side: str, wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    file = pair(wan2, tmp_path)[side]
    for start in (file, {side: file}):
        text = refusal(tmp_path, wan2, start, OF_HIGH if side == "low_noise" else OF_ONE)
        assert text.startswith(
            f"recipe: `lora.start`: {file} is for the {side.replace('_', '-')} expert, which"
        )
        assert f"Leave it out, or write both={file}." in text


def test_one_file_for_both_networks_counts_by_its_content_for_each(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    file = style(wan2, tmp_path / "x" / "style.safetensors", "to_q")
    for student in (TWO, OF_ONE):
        start = adapters(job_with(tmp_path, wan2, f"both={file}", student))["start"]
        assert start.keys() == {e.value for e in Expert} and len({*start.values()}) == 1
    assert "nothing says for which" in refusal(tmp_path, wan2, str(file), TWO)


def test_a_start_with_numbers_that_are_not_finite_is_named_before_a_weight_is_read(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    state = load_file(file := style(wan1, tmp_path / "style.safetensors", "to_q"))
    state[key := f"transformer.{LAYER}.lora_A.weight"][1, 2] = torch.inf
    save_file(state, file)
    wanted = f"{file}: tensor `{key}` holds numbers that are not finite. Fetch or train the LoRA again."
    assert refusal(tmp_path, wan1, str(file), {}) == wanted


def test_a_whole_model_is_refused_with_the_command_that_makes_a_lora_of_it(
    wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    model = WanTransformer3DModel.from_pretrained(wan1 / "transformer")
    model.save_pretrained(tmp_path / "few" / "transformer")
    few = tmp_path / "few"
    assert refusal(tmp_path, wan1, str(few), {}) == (
        f"{few}: is a whole model. Make a LoRA of it: `wandistiller export --adapter --checkpoint {few} "
        f"--teacher_path {wan1} --targets to_q to_k to_v to_out --rank 4 --output few_lora`, and give "
        "few_lora."
    )
