"""Settings of torch's memory allocators and of the C library's."""

import os
import resource

import pytest
import torch

from wandistiller.utils.system_memory import ALLOCATOR_SETTINGS, ALLOCATOR_VARIABLES, set_allocators


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_torch_s_allocators_are_set_where_the_user_has_not_set_them() -> None:
    set_allocators()
    assert os.environ["PYTORCH_ALLOC_CONF"] == ALLOCATOR_SETTINGS


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_the_user_s_own_setting_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    set_allocators()
    assert {n: os.environ[n] for n in ALLOCATOR_VARIABLES if n in os.environ} == {
        name: "max_split_size_mb:128"
    }


@pytest.mark.parametrize("key", [setting.split(":")[0] for setting in ALLOCATOR_SETTINGS.split(",")])
def test_torch_knows_each_setting(key: str) -> None:
    torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS)
    with pytest.raises((ValueError, RuntimeError)):  # torch ignores a key that it does not know
        torch._C._accelerator_setAllocatorSettings(f"{key}:none of its values")


def test_memory_that_a_step_frees_is_not_taken_from_the_system_again() -> None:
    set_allocators()
    faults = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step = [torch.ones(2 * 2**20) for _ in range(20)]  # 160 MiB, 40,000 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del step
    assert min(faults[1:]) < 1000
