"""Settings of torch's memory allocators and of the C library's."""

import os
import resource

import pytest
import torch

from wandistiller.utils import allocators


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocators.TORCH:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_torch_s_allocators_are_set_where_the_user_has_not_set_them() -> None:
    allocators.set_defaults()
    assert os.environ["PYTORCH_ALLOC_CONF"] == allocators.SETTINGS


@pytest.mark.parametrize("name", allocators.TORCH)
def test_the_user_s_own_setting_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    allocators.set_defaults()
    assert {n: os.environ[n] for n in allocators.TORCH if n in os.environ} == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize("key", [setting.split(":")[0] for setting in allocators.SETTINGS.split(",")])
def test_torch_knows_each_setting(key: str) -> None:
    torch._C._accelerator_setAllocatorSettings(allocators.SETTINGS)
    with pytest.raises((ValueError, RuntimeError)):  # torch ignores a key that it does not know
        torch._C._accelerator_setAllocatorSettings(f"{key}:none of its values")


def test_memory_that_a_step_frees_is_not_taken_from_the_system_again() -> None:
    allocators.set_defaults()
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step = [torch.ones(2 * 2**20) for _ in range(20)]  # 160 MiB, 40,000 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del step
    assert min(faults[1:]) < 1000
