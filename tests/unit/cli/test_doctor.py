"""Lines of `wandistiller doctor` about a machine."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension
from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
from ranks import ROOT, has_async_io, wandistiller

from wandistiller.cli.doctor import built, cuda_compiler, differences
from wandistiller.engine.extensions import HEADERS


def test_doctor_names_versions_builds_and_memory() -> None:
    output = wandistiller("doctor").stdout
    expected = ["python 3.", f"torch {torch.__version__}", "accelerate", "GiB of CPU memory free"]
    expected += [f"built      {name}" for name in ("CPU Adam", *["async_io"] * has_async_io())]
    assert [words for words in expected if words not in output] == []


@pytest.mark.slow
def test_two_ranks_communicate() -> None:
    output = wandistiller("doctor", ranks=2).stdout
    assert "ranks      2, at most 2 a node; gloo, sum over them right" in output and "differs" not in output


class OnGpu(AsyncIOBuilder):
    """As DeepSpeed builds it where there is a GPU."""

    def load(self, verbose: bool = False) -> Any:
        self.build_for_cpu = False
        return self.nvcc_args()


def test_a_missing_cuda_compiler_is_a_line_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnGpu, "is_compatible", lambda self, verbose: True)
    for home in (None, str(tmp_path)):  # no toolkit; one that only runs programs
        monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", home)
        assert built("async_io", OnGpu(), "").startswith("missing    async_io does not build: ")
        line = cuda_compiler("12.8")
        assert line.startswith("missing    nvcc: ")
        assert "install the CUDA toolkit 12.8" in line and "set CUDA_HOME" in line


ONE_HEADER = (
    "missing    headers of the CUDA toolkit, cusparse.h, cublas_v2.h, cusolverDn.h: there is only nvcc "
)


@pytest.mark.parametrize(
    ("installed", "headers", "line"),
    [
        ("12.6", HEADERS, "compiler   nvcc 12.6 in "),
        ("13.0", HEADERS, "missing    nvcc of torch's CUDA 12.8: "),
        ("12.6", HEADERS[:1], ONE_HEADER),  # Debian's cuda-nvcc and cuda-cudart-dev
    ],
)
def test_the_cuda_compiler_must_have_torch_s_major_version_and_the_toolkit_s_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str, headers: tuple[str, ...], line: str
) -> None:
    (tmp_path / "include").mkdir()
    for header in headers:
        (tmp_path / "include" / header).touch()
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {installed}, V{installed}.1\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    assert cuda_compiler("12.8").startswith(line)


def test_differences_between_nodes_are_listed() -> None:
    first, second = {"torch": "2.13.0", "peft": "0.21"}, {"torch": "2.14.0", "peft": "0.21"}
    ranks = [("gpu01", first), ("gpu01", first), ("gpu02", second), ("gpu03", {})]
    remedy = "Give all nodes the same environment"
    assert differences(ranks) == [
        f"differs    peft: 0.21 on gpu01, gpu02; none on gpu03. {remedy}",
        f"differs    torch: 2.13.0 on gpu01; 2.14.0 on gpu02; none on gpu03. {remedy}",
    ]
    assert differences(ranks[:2]) == []


def test_the_example_of_a_deepspeed_env_has_a_value_for_each_variable() -> None:
    lines = (ROOT / "launch" / "deepspeed_env.example").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines)  # as deepspeed 0.19.8 parses it
    assert variables and all(name.isidentifier() and value for name, value in variables.items())
