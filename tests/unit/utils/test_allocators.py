"""Settings of torch's memory allocators."""

import os

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
