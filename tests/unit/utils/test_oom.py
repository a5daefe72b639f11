"""Errors that mean that memory ran out, really provoked, and the line that says what there was."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import environment

from wandistiller.planner.machine import memory_line
from wandistiller.utils.oom import Spent, is_out_of_memory, what_ran_out
from wandistiller.utils.system_memory import GIB

PROVOKED = """
import json, resource, sys
import numpy, torch
from safetensors import safe_open
from safetensors.torch import load_file
from wandistiller.utils.oom import is_out_of_memory, what_ran_out
from wandistiller.planner.machine import memory_line
file, GIB = sys.argv[1], 2**30

def torch_empty(): torch.empty(GIB)
def torch_result(): torch.ones(2**13, 1) @ torch.ones(1, 2**16)
def torch_mapped(): torch.from_file(file, size=2**26)
def numpy_zeros(): numpy.zeros(GIB)
def python_bytes(): bytearray(2 * GIB)
def safetensors_open(): safe_open(file, "pt")
def safetensors_load(): load_file(file)
def wrapped():
    try: torch.empty(GIB)
    except RuntimeError as error: raise ValueError("the step failed") from error
def in_clean_up():
    try: torch.empty(GIB)
    finally: raise RuntimeError("Connection closed by peer")

pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + 2**27, pages + 2**27))
found = {"limit": pages + 2**27, "line": memory_line(0)}
for provoke in (torch_empty, torch_result, torch_mapped, numpy_zeros, python_bytes, safetensors_open,
                safetensors_load, wrapped, in_clean_up):
    try:
        provoke()
        found[provoke.__name__] = "no error"
    except Exception as error:
        found[provoke.__name__] = is_out_of_memory(error) and what_ran_out(error).name
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def provoked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process under a limit of 128 MiB thinks of the errors that it gets."""
    file = tmp_path_factory.mktemp("provoked") / "large.safetensors"
    with file.open("wb") as made:  # one float32 tensor of 256 MiB, none of it written
        header = json.dumps({"a": {"dtype": "F32", "shape": [2**26], "data_offsets": [0, 2**28]}}).encode()
        made.write(len(header).to_bytes(8, "little") + header)
        made.truncate(8 + len(header) + 2**28)
    done = subprocess.run(
        [sys.executable, "-c", PROVOKED, str(file)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CASES = (
    "torch_empty",
    "torch_result",
    "torch_mapped",
    "numpy_zeros",
    "python_bytes",
    "safetensors_open",
    "safetensors_load",
    "wrapped",
    "in_clean_up",
)


@pytest.mark.parametrize("case", CASES)
def test_a_real_failure_to_allocate_is_known_as_such(provoked: dict[str, Any], case: str) -> None:
    assert provoked[case] == "HOST"


@pytest.mark.parametrize(
    ("error", "spent"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Spent.DEVICE),
        (
            RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
            Spent.DEVICE,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            Spent.DEVICE,
        ),
        (
            RuntimeError("CUDA error: out of memory"),
            Spent.HOST,
        ),  # a page-locked buffer; there is no GPU here to be full
        (RuntimeError("std::bad_alloc"), Spent.HOST),
        (OSError(12, "Cannot allocate memory"), Spent.HOST),
    ],
    ids=lambda value: str(value)[:20],
)
def test_which_memory_ran_out_is_read_off_the_error(error: Exception, spent: Spent) -> None:
    assert is_out_of_memory(error) and what_ran_out(error) is spent


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        OSError(28, "No space left on device"),
        RuntimeError("[../gloo/pair.cc] Connection closed by peer"),
        KeyError("memory"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_error_of_before_that_was_dealt_with_is_forgotten() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("nothing left") from None
    except ValueError as error:
        assert not is_out_of_memory(error)


# Readings


def test_the_memory_line_has_this_process_s_numbers() -> None:
    line = memory_line(3)
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / GIB
    assert line.startswith("rank 3: ") and "\n" not in line
    found = float(line.split("this process: ")[1].split(" GiB")[0])
    assert found == pytest.approx(pages, rel=0.1)


def test_the_memory_line_has_the_process_s_limit(provoked: dict[str, Any]) -> None:
    assert f"limited to {provoked['limit'] / GIB:.2f} GiB (of address space, ulimit -v)" in provoked["line"]


def test_the_memory_line_has_the_control_group_s_limit(tmp_path: Path) -> None:
    for file, text in {
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "proc/self/status": "Name:\tpython\nVmSize:\t 2097152 kB\nVmRSS:\t 1048576 kB\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{7 * GIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"active_file 0\ninactive_file {GIB // 2}\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert memory_line(0, tmp_path).endswith(
        "this process: 1.00 GiB of CPU memory, 2.00 GiB of address space; limited to 8.00 GiB (control group)"
        "; machine: 61.04 GiB, 1.50 GiB free for it"
    )
