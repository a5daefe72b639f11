"""What is settled of the memory allocators before torch is imported."""

import os
import subprocess
import sys

import pytest
import torch
from ranks import environment

from wandistiller import allocators


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocators.TORCH:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_torch_s_allocators_are_set_where_the_user_said_nothing() -> None:
    allocators.settle()
    assert os.environ["PYTORCH_ALLOC_CONF"] == allocators.SETTINGS


@pytest.mark.parametrize("name", allocators.TORCH)
def test_what_the_user_said_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    allocators.settle()
    assert {n: os.environ[n] for n in allocators.TORCH if n in os.environ} == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize("key", [setting.split(":")[0] for setting in allocators.SETTINGS.split(",")])
def test_torch_knows_each_setting(key: str) -> None:
    torch._C._accelerator_setAllocatorSettings(allocators.SETTINGS)
    with pytest.raises((ValueError, RuntimeError)):
        torch._C._accelerator_setAllocatorSettings(f"{key}:none of its values")  # a key that it does not know is passed over


FREED = """
import os, torch
from wandistiller import allocators, usage
allocators.settle_for(int(os.environ["PARAMETERS"]))
torch.ones(2**24, dtype=torch.uint8)  # by a block of its own pages that is freed, glibc learns to keep smaller ones
blocks = [torch.ones(2**21, dtype=torch.uint8) for _ in range(200)]
kept = blocks[::10]
before = usage.read().host
del blocks
print((before - usage.read().host) >> 20)
"""
"""200 blocks of 2 MiB, of which every tenth is kept: prints how many MiB go back to the system when the others are freed."""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="needs glibc")
@pytest.mark.parametrize(("parameters", "env", "least", "most"), [
    (allocators.LARGE, {}, 355, 365), (allocators.LARGE, {"MALLOC_MMAP_THRESHOLD_": str(2**25)}, -20, 20),
    (allocators.LARGE - 1, {}, -20, 60),
])  # fmt: skip
def test_what_is_freed_between_what_stays_goes_back_for_a_large_network_unless_the_user_set_otherwise(
    parameters: int, env: dict, least: int, most: int
) -> None:
    env = environment(PARAMETERS=str(parameters), **env)
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and least <= int(done.stdout) <= most, done.stdout + done.stderr
