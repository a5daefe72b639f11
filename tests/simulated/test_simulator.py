"""The simulated GPU itself: numbers are the CPU's, and each kind of fault is found."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import simulated_gpus
from ranks import call, program
from simulated import Simulated, simulated_gpu

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


@pytest.fixture
def devices(tmp_path: Path) -> Simulated:
    return Simulated(tmp_path, gpus=2, mib=64)


def on(devices: Simulated, function: Callable[..., Any], *arguments: Any, ranks: int = 1) -> list[Any]:
    return call(function, *arguments, ranks=ranks, start=partial(program, gpus=devices))


def test_every_number_is_the_cpu_s_bitwise(devices: Simulated) -> None:
    (found,) = on(devices, simulated_gpus.arithmetic, simulated_gpus.GPU)
    expected = simulated_gpus.arithmetic("cpu")
    assert [torch.equal(f, e) for f, e in zip(found, expected, strict=True)] == [True] * len(expected)
    assert devices.reports() == ""


def test_a_vae_in_tiles_codes_as_on_a_cpu_bitwise(tmp_path: Path) -> None:
    devices = Simulated(tmp_path, mib=1024)
    (found,) = on(devices, simulated_gpus.coded_in_tiles, simulated_gpus.GPU)
    assert all(map(torch.equal, found, simulated_gpus.coded_in_tiles("cpu"))) and devices.reports() == ""


def test_a_kernel_that_does_not_wait_for_a_copy_is_reported_and_computes_nan(devices: Simulated) -> None:
    assert on(devices, simulated_gpus.late_copy, False) == [False]
    report = devices.reports()
    assert "RACE: read by aten::add" in report and "not ordered after write by copy to the device" in report
    assert report.count("simulated_gpus.py") >= 2  # both places


def test_a_kernel_that_waits_for_a_copy_finds_it(devices: Simulated) -> None:
    assert on(devices, simulated_gpus.late_copy, True) == [True]
    assert devices.reports() == ""


def test_the_host_does_not_find_a_copy_that_it_has_not_waited_for(devices: Simulated) -> None:
    assert on(devices, simulated_gpus.early_read) == [False]


@pytest.mark.parametrize("record", [True, False])
def test_memory_that_another_stream_uses_is_freed_by_record_stream_alone(
    record: bool, devices: Simulated
) -> None:
    on(devices, simulated_gpus.freed_too_early, record)
    assert ("RACE" in devices.reports()) is not record


@pytest.mark.parametrize("wait", [True, False])
def test_a_late_copy_of_memory_that_is_freed_is_reported(wait: bool, devices: Simulated) -> None:
    on(devices, simulated_gpus.unregister_too_early, wait)
    assert ("USE of host memory" in devices.reports()) is not wait


def test_a_host_that_reads_device_memory_dies_with_a_message(devices: Simulated) -> None:
    with pytest.raises(AssertionError, match="host code read or wrote device memory"):
        on(devices, simulated_gpus.host_reads_device_memory)


def test_tensors_on_two_devices_are_refused_and_copied(devices: Simulated) -> None:
    ((cpu, other),) = on(devices, simulated_gpus.on_two_devices)
    assert "cuda:0 and cpu" in cpu and "cuda:0 and cuda:1" in other
    assert devices.reports() == ""


def test_memory_ends_with_cuda_s_error_and_is_given_back(devices: Simulated) -> None:
    (found,) = on(devices, simulated_gpus.fill, 100)
    assert found["error"].startswith("CUDA out of memory. Tried to allocate 1 MiB.")
    assert found["taken"] == 64 * 2**20 and found["free"] == 0 and found["left"] == 0


def test_devices_are_there_after_a_command_on_the_cpu_in_the_test_process(
    devices: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as `wandistiller.cli.process` leaves it
    assert on(devices, torch.cuda.device_count) == [2]


def test_an_event_has_not_happened_when_it_is_first_asked_for(devices: Simulated) -> None:
    assert on(devices, simulated_gpus.poll) == [4]


@pytest.mark.parametrize("fault", ["", "wait", "wait_stream"])
def test_a_wait_that_the_block_stream_leaves_out_is_reported(fault: str, devices: Simulated) -> None:
    (right,) = on(devices, simulated_gpus.sweeps, fault)
    assert right is not (fault == "wait") and ("RACE" in devices.reports()) is bool(fault)


def test_collectives_have_gloo_s_values_on_devices(devices: Simulated) -> None:
    assert on(devices, simulated_gpus.reduced, torch.float32, ranks=2) == 2 * [[3, 3, 1, 1, 2, 2, 1.5, 2, 2]]
    assert devices.reports() == ""


@pytest.mark.parametrize("wait", [True, False])
def test_a_collective_that_is_not_waited_for_is_reported(wait: bool, devices: Simulated) -> None:
    on(devices, simulated_gpus.work_without_wait, wait, ranks=2)
    assert ("RACE" in devices.reports()) is not wait


def test_a_rank_that_calls_one_collective_less_is_told_what_the_others_call(devices: Simulated) -> None:
    found = on(devices, simulated_gpus.one_collective_less, ranks=2)
    assert all("RANKS disagree" in one for one in found) and "allreduce" in found[0].lower()
