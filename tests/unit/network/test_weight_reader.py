"""Reading safetensors: the bytes of a tensor in any precision, and files that are not whole."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from ranks import wandistiller, write_json
from recipes import recipe
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from small_wan import small_transformer
from torch import Tensor

from wandistiller.network.weight_reader import CHUNK_BYTES, WeightReader
from wandistiller.utils.files import read_json
from wandistiller.wan.checks import transformer_problems
from wandistiller.wan.transformer_config import TransformerConfig

NAME = "diffusion_pytorch_model.safetensors"
Spoil = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def stored(folder: Path, **tensors: Tensor) -> WeightReader:
    save_file(tensors, folder / NAME)
    return WeightReader(folder)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("saved", "read"), product(FLOATS, FLOATS[1:]))
def test_a_tensor_of_many_chunks_is_converted_as_by_to(
    tmp_path: Path, saved: torch.dtype, read: torch.dtype
) -> None:
    value = torch.randn(3, CHUNK_BYTES // saved.itemsize - 1).to(saved)
    out = torch.empty_like(value, dtype=read)
    stored(tmp_path, other=torch.ones(3), x=value).read("x", out)
    assert torch.equal(out, value.to(read))


@pytest.mark.parametrize(("first", "expected"), [(4, [4, 5, 6, 7]), (8, [8, 9, -1, -1]), (12, [-1] * 4)])
def test_a_part_is_read_up_to_the_tensor_s_end_and_no_further(
    tmp_path: Path, first: int, expected: list[float]
) -> None:
    out = torch.full((4,), -1.0)
    stored(tmp_path, x=torch.arange(10.0).view(2, 5)).read("x", out, first)
    assert out.tolist() == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_noted_once_with_file_and_tensor(tmp_path: Path, bad: float) -> None:
    value = torch.zeros(CHUNK_BYTES // 4 + 8)
    value[[3, -2]] = bad
    reader = stored(tmp_path, x=value)
    reader.read("x", torch.empty_like(value))
    assert reader.faults == [
        f"{tmp_path / NAME}: tensor `x` holds numbers that are not finite in float32. Fetch this "
        "file again, or choose another precision."
    ]


def test_a_number_is_noted_if_it_is_too_large_for_the_precision_it_is_read_in(tmp_path: Path) -> None:
    reader = stored(tmp_path, fits=torch.tensor([3e38, -3e38]), x=torch.tensor([1e6]))
    reader.read("fits", torch.empty(2))
    assert reader.faults == []
    reader.read("x", torch.empty(1, dtype=torch.float16))
    assert "tensor `x` holds numbers that are not finite in float16" in reader.faults[0]


def test_a_file_that_shrinks_after_it_was_opened_is_noted(tmp_path: Path) -> None:
    reader = stored(tmp_path, x=torch.ones(100))
    with (tmp_path / NAME).open("r+b") as file:
        file.truncate(200)
    reader.read("x", torch.empty(100))
    assert reader.faults == [
        f"{tmp_path / NAME}: tensor `x` could not be read: the file ends inside it. Fetch this file again."
    ]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    small_transformer(1, 1).save_pretrained(tmp_path)
    return tmp_path


def problems(folder: Path) -> list[str]:
    return transformer_problems(folder, TransformerConfig.of(read_json(folder / "config.json")))


def rewrite(folder: Path, change: Spoil) -> None:
    save_file(change(load_file(folder / NAME)), folder / NAME)


def test_a_whole_folder_and_tensors_that_diffusers_ignores_are_no_problem(teacher: Path) -> None:
    assert problems(teacher) == []
    rewrite(teacher, lambda tensors: tensors | {"blocks.0.attn2.norm_added_q.weight": torch.ones(1)})
    assert problems(teacher) == []


def test_an_index_that_names_a_missing_file_is_a_problem(teacher: Path) -> None:
    small_transformer(1, 1).save_pretrained(teacher, max_shard_size="100KB")
    (teacher / NAME).unlink()
    shard = max(teacher.glob("*.safetensors"))
    shard.unlink()
    (text,) = problems(teacher)
    assert text.startswith(f"{shard}: there is no such file. Fetch this file again")


@pytest.mark.parametrize(
    "name", slow_but(["zero_inference_cpu"], ["zero_inference_cpu", "owner", "host_cpu", "files"])
)
def test_a_teacher_with_a_nan_stops_both_ranks_with_one_message(
    name: str, tmp_path: Path, wan2: Path, copy_of: Callable[..., Path]
) -> None:
    folder = copy_of(wan2, weights=True)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["proj_out.weight"][-1, -1] = float("nan")  # in the part of the last rank
        return tensors

    rewrite(folder / "transformer_2", spoil)
    more = {"max_steps": 1, "teacher_deepspeed_config": f"ds_configs/teacher/{name}.json"}
    given = recipe(tmp_path, folder, output_dir=str(tmp_path / "out"), **more)
    file = write_json(tmp_path / "run.json", given)
    error = wandistiller("train", "--recipe", file, ranks=2, code=2).stderr
    assert error.count("error: ") == 1 and "Traceback" not in error
    damaged = folder / "transformer_2" / NAME
    assert f"{damaged}: tensor `proj_out.weight` holds numbers that are not finite" in error
