"""Lines of `wandistiller doctor` about a machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension
from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
from ranks import ROOT, has_async_io, wandistiller

from wandistiller.cli.doctor import built, cuda_compiler, differences, slow_bf16
from wandistiller.planner.hardware_rates import CPU_ONLY, override_rates


def test_doctor_names_versions_builds_and_memory() -> None:
    output = wandistiller("doctor").stderr
    built = [f"built      {name}" for name in ("CPU Adam", *["async_io"] * has_async_io())]
    versions = ["python 3.", f"torch {torch.__version__}", "accelerate"]
    assert [words for words in (*versions, *built, "GiB of CPU memory free") if words not in output] == []


def test_two_ranks_hear_each_other_and_measure_what_the_planner_takes() -> None:
    said = wandistiller("doctor", "--measure", ranks=2).stderr
    assert "ranks      2, at most 2 a node; gloo, sum over them right" in said and "differs" not in said
    (words,) = [line for line in said.splitlines() if line.startswith("rates ")]
    for unit in ("operations/s a rank", "GB/s of CPU memory", "GB/s of disk", "GB/s between ranks of a node"):
        assert f" {unit}" in words
    found = json.loads(re.search("--rates '(.*)'", said)[1])
    assert set(found) == {"tflops", "cpu_tflops", "memory", "disk", "link"}
    assert found["cpu_tflops"] == pytest.approx(2 * found["tflops"], rel=0.02), (
        "a node's is that of both ranks together"
    )
    assert override_rates(CPU_ONLY, found).link == found["link"]


class OnGpu(AsyncIOBuilder):
    """As DeepSpeed builds it where there is a GPU."""

    def load(self, verbose: bool = False) -> Any:
        self.build_for_cpu = False
        return self.nvcc_args()


def test_a_gpu_without_cuda_s_compiler_is_a_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnGpu, "is_compatible", lambda self, verbose: True)
    for home in (None, str(tmp_path)):  # no toolkit; one that only runs programs
        monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", home)
        assert built("async_io", OnGpu(), "").startswith("missing    async_io does not build: ")
        said = cuda_compiler("12.8")
        assert (
            said.startswith("missing    nvcc: ")
            and "install the CUDA toolkit 12.8" in said
            and "set CUDA_HOME" in said
        )


@pytest.mark.parametrize(
    ("there", "said"),
    [("12.6", "compiler   nvcc 12.6 in "), ("13.0", "missing    nvcc of torch's CUDA 12.8: ")],
)
def test_the_compiler_of_cuda_must_be_of_torch_s_major_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, said: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text(
        f"#!/bin/sh\necho Cuda compilation tools, release {there}, V{there}.1\n"
    )
    (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    assert cuda_compiler("12.8").startswith(said)


def test_what_is_not_the_same_on_all_nodes_is_told() -> None:
    first, second = {"torch": "2.13.0", "peft": "0.21"}, {"torch": "2.14.0", "peft": "0.21"}
    ranks = [("gpu01", first), ("gpu01", first), ("gpu02", second), ("gpu03", {})]
    remedy = "Give all nodes the same environment"
    assert differences(ranks) == [
        f"differs    peft: 0.21 on gpu01, gpu02; none on gpu03. {remedy}",
        f"differs    torch: 2.13.0 on gpu01; 2.14.0 on gpu02; none on gpu03. {remedy}",
    ]
    assert differences(ranks[:2]) == []


def test_the_example_of_a_deepspeed_env_is_understood() -> None:
    lines = (ROOT / "launch" / "deepspeed_env.example").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines)  # as deepspeed 0.19.8 parses it
    assert variables and all(name.isidentifier() and value for name, value in variables.items())


@pytest.mark.parametrize(
    ("flags", "lines"),
    [("avx2 avx512f avx512_vnni", 1), ("avx512f avx512_bf16 amx_tile", 0), ("fp asimd sve bf16", 0)],
)
def test_a_cpu_that_computes_bf16_by_way_of_float32_is_told(
    tmp_path: Path, one_rank: torch.device, flags: str, lines: int
) -> None:
    if one_rank.type != "cpu":
        pytest.skip("the ranks here have a GPU")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {flags}\n")
    assert len(slow_bf16(tmp_path)) == lines
