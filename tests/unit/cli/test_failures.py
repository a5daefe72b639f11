"""Real out-of-memory errors of all libraries, and the line that describes the memory."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from wandistiller.cli.failures import is_out_of_memory
from wandistiller.distributed import device
from wandistiller.planner import machine
from wandistiller.planner.machine import memory_line
from wandistiller.utils.system_memory import GIB


def wrapped(_: Path) -> None:
    try:
        torch.empty(GIB)
    except RuntimeError as error:
        raise ValueError("the step failed") from error


def in_clean_up(_: Path) -> None:
    try:
        torch.empty(GIB)
    finally:
        raise RuntimeError("Connection closed by peer")


PROVOKED: dict[str, Callable[[Path], object]] = {
    "torch": lambda _: torch.empty(GIB),
    "a result of torch": lambda _: torch.ones(2**13, 1) @ torch.ones(1, 2**16),
    "a file mapped by torch": lambda file: torch.from_file(str(file), size=2**26),
    "numpy": lambda _: np.zeros(GIB),
    "python": lambda _: bytearray(2 * GIB),
    "safetensors opens": lambda file: safe_open(file, "pt"),
    "safetensors loads": load_file,
    "wrapped": wrapped,
    "in clean-up": in_clean_up,
}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file with one float32 tensor of 256 MiB, none of it written."""
    file = tmp_path / "large.safetensors"
    with file.open("wb") as made:
        header = json.dumps({"a": {"dtype": "F32", "shape": [2**26], "data_offsets": [0, 2**28]}}).encode()
        made.write(len(header).to_bytes(8, "little") + header)
        made.truncate(8 + len(header) + 2**28)
    return file


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let this process take 128 MiB of addresses more, and no byte beyond them."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + 2**27, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("case", PROVOKED)
def test_a_real_failure_to_allocate_is_recognized(case: str, large: Path, little_memory: None) -> None:
    with pytest.raises(Exception) as failed:
        PROVOKED[case](large)
    assert is_out_of_memory(failed.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("NCCL error: unhandled\nLast error:\nCuda failure 2 'out of memory'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `f(handle)`"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),  # oneDNN in torch 2.13
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("Resource temporarily unavailable"),  # torch: a thread's stack
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_error_of_a_library_is_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_a_gpu_whose_memory_cannot_even_be_asked_for_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not start where other processes hold all memory; here it does not start for want of a GPU."""
    for module in (device, machine):
        monkeypatch.setattr(module, "on_accelerator", lambda: True)
    assert "GPU 0: other processes hold all its memory; this process: " in memory_line(0)


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
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_an_earlier_error_that_was_handled_is_ignored() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise ValueError("nothing left") from None
    except ValueError as error:
        assert not is_out_of_memory(error)


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
