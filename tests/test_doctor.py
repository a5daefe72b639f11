"""What `wandistiller doctor` says of a machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension
from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
from ranks import has_async_io, wandistiller

from wandistiller.doctor import built, cuda_compiler, differences, examine, slow_bf16
from wandistiller.hostfile import require_env
from wandistiller.problems import ConfigError
from wandistiller.rates import CPU_ONLY, given


def test_doctor_names_versions_builds_and_memory() -> None:
    said = wandistiller("doctor").stderr
    parts = ["CPU Adam", *(["async_io"] if has_async_io() else [])]
    for words in ("python 3.", f"torch {torch.__version__}", *(f"built      {name}" for name in parts), "GiB of CPU memory free",
                  "accelerate"):  # fmt: skip
        assert words in said, said


def test_two_ranks_hear_each_other_and_measure_what_the_planner_takes() -> None:
    said = wandistiller("doctor", "--measure", ranks=2).stderr
    assert "ranks      2, at most 2 a node; gloo, sum over them right" in said and "differs" not in said
    (words,) = [line for line in said.splitlines() if line.startswith("rates ")]
    for unit in ("operations/s a rank", "GB/s of CPU memory", "GB/s of disk", "GB/s between ranks of a node"):
        assert f" {unit}" in words
    found = json.loads(re.search("--rates '(.*)'", said)[1])
    assert set(found) == {"tflops", "cpu_tflops", "memory", "disk", "link"}
    assert found["cpu_tflops"] == pytest.approx(2 * found["tflops"], rel=0.02), "a node's is that of both ranks together"
    assert given(CPU_ONLY, found).link == found["link"]


class OnGpu(AsyncIOBuilder):
    """As DeepSpeed builds it where there is a GPU."""

    def load(self, verbose: bool = False) -> Any:
        self.build_for_cpu = False
        return self.nvcc_args()


def test_a_gpu_without_cuda_s_compiler_is_a_line_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnGpu, "is_compatible", lambda self, verbose: True)
    for home in (None, str(tmp_path)):  # no toolkit; one that only runs programs
        monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", home)
        assert built("async_io", OnGpu(), "").startswith("missing    async_io does not build: ")
        said = cuda_compiler("12.8")
        assert said.startswith("missing    nvcc: ") and "install the CUDA toolkit 12.8" in said and "set CUDA_HOME" in said


@pytest.mark.parametrize(("there", "said"), [("12.6", "compiler   nvcc 12.6 in "),
                                             ("13.0", "missing    nvcc of torch's CUDA 12.8: ")])  # fmt: skip
def test_the_compiler_of_cuda_must_be_of_torch_s_major_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, said: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").write_text(f"#!/bin/sh\necho Cuda compilation tools, release {there}, V{there}.1\n")
    (tmp_path / "bin/nvcc").chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    assert cuda_compiler("12.8").startswith(said)


def test_what_is_not_the_same_on_all_nodes_is_told() -> None:
    ranks = [("gpu01", {"torch": "2.13.0", "peft": "0.21"})] * 2 + [("gpu02", {"torch": "2.14.0", "peft": "0.21"}), ("gpu03", {})]
    assert differences(ranks) == [
        "differs    peft: 0.21 on gpu01, gpu02; none on gpu03. Give all nodes the same environment",
        "differs    torch: 2.13.0 on gpu01; 2.14.0 on gpu02; none on gpu03. Give all nodes the same environment",
    ]
    assert differences(ranks[:2]) == []


def test_a_hostfile_without_slots_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu01 slots=0\n")
    said = wandistiller("doctor", "--hostfile", tmp_path / "hostfile", code=2).stderr.strip()
    assert said == (f"error: {tmp_path}/hostfile, line 1: `gpu01` has no slots. Write how many processes run there, or leave the "
                    "line out.")  # fmt: skip


def looked_at(folder: Path, flags: str) -> str:
    (folder / "hostfile").write_text("gpu01 slots=8\ngpu02 slots=8\ngpu03 slots=8\n")
    return examine(folder / "hostfile", None, flags, measure=False)[0]


@pytest.mark.parametrize(("flags", "said"), [
    ("--no_ssh --node_rank 2", "3 nodes, 24 slots; this is node 2, gpu03"),
    ("--no_ssh --node_rank 1 --exclude gpu02", "2 nodes, 16 slots; this is node 1, gpu03"),
    ("--no_ssh --node_rank 0 --include gpu02@gpu03:0,1 --master_addr gpu02", "2 nodes, 10 slots; this is node 0, gpu02"),
    ("--no_ssh --node_rank 0 --num_nodes 1", "1 nodes, 8 slots; this is node 0, gpu01"),
    ("--launcher slurm", "3 nodes, 24 slots"),
])  # fmt: skip
def test_flags_of_the_deepspeed_launcher_choose_among_the_nodes(tmp_path: Path, flags: str, said: str) -> None:
    assert looked_at(tmp_path, flags) == f"hostfile   {tmp_path}/hostfile: {said}"


@pytest.mark.parametrize(("flags", "said"), [
    ("--no_ssh --node_rank 3", "command line: `node_rank` is 3. Write the number of this node, from 0 to 2, in the order of "),
    ("--no_ssh --node_rank 0 --exclude gpu04", "cannot be followed: Hostname 'gpu04' not found in hostfile. Write nodes of this"),
    ("--include gpu01:9", "cannot be followed: No slot '9' specified on host 'gpu01'. Write nodes of this"),
    ("--exclude gpu01@gpu02@gpu03", "`--exclude gpu01@gpu02@gpu03` leaves no node. Leave one."),
])  # fmt: skip
def test_flags_that_the_deepspeed_launcher_could_not_follow_are_one_message(tmp_path: Path, flags: str, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        looked_at(tmp_path, flags)
    assert len(found.value.problems) == 1 and said in found.value.problems[0]


def test_without_pdsh_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="There is no pdsh here.*apt install pdsh"):
        looked_at(tmp_path, "--exclude gpu03")


def test_a_line_of_deepspeed_env_that_is_no_variable_is_named(tmp_path: Path) -> None:
    file = tmp_path / ".deepspeed_env"
    file.write_text("A=1\n# NCCL_DEBUG=INFO\n\n B = 2=3\n")
    with pytest.raises(ConfigError) as found:
        require_env([file])
    assert [said.partition(" is no variable")[0] for said in found.value.problems] == [
        f"{file}, line 2: `# NCCL_DEBUG=INFO`", f"{file}, line 3: ``"]  # fmt: skip


def test_the_example_of_a_deepspeed_env_is_understood() -> None:
    example = Path(__file__).parent.parent / "launch" / "deepspeed_env.example"
    require_env([example])
    given = dict(line.split("=", 1) for line in example.read_text().splitlines())  # as deepspeed 0.19.8 takes it apart
    assert given and all(name.isidentifier() and value for name, value in given.items())


@pytest.mark.parametrize(("flags", "lines"), [("avx2 avx512f avx512_vnni", 1), ("avx512f avx512_bf16 amx_tile", 0),
                                              ("fp asimd sve bf16", 0)])  # fmt: skip
def test_a_cpu_that_computes_bf16_by_way_of_float32_is_told(
    tmp_path: Path, one_rank: torch.device, flags: str, lines: int
) -> None:
    if one_rank.type != "cpu":
        pytest.skip("the ranks here have a GPU")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"flags : {flags}\n")
    assert len(slow_bf16(tmp_path)) == lines
