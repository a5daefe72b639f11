"""What `wandistiller doctor` says of a machine."""

from pathlib import Path

import pytest
import torch
from ranks import has_async_io, wandistiller

from wandistiller.doctor import slow_bf16


def test_doctor_names_versions_builds_and_memory() -> None:
    said = wandistiller("doctor").stderr
    built = ["CPU Adam", *(["async_io"] if has_async_io() else [])]
    for words in ("python 3.", f"torch {torch.__version__}", *(f"built      {name}" for name in built), "GiB of CPU memory free"):
        assert words in said, said


def test_two_ranks_measure_what_the_planner_takes() -> None:
    said = wandistiller("doctor", "--measure", ranks=2).stderr
    rates = [line for line in said.splitlines() if "rates" in line]
    assert len(rates) == 1 and "start it with a launcher" not in rates[0]
    assert all(words in rates[0] for words in ("operations/s", "CPU memory", "disk", "between ranks"))


def test_a_hostfile_without_slots_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("gpu01 slots=0\n")
    said = wandistiller("doctor", "--hostfile", tmp_path / "hostfile", code=2).stderr.strip()
    assert said == (f"error: {tmp_path}/hostfile, line 1: `gpu01` has no slots. Write how many processes run there, or leave the "
                    "line out.")  # fmt: skip


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
