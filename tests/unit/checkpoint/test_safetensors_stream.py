"""Pieces of tensors in several files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wandistiller.checkpoint import safetensors_stream
from wandistiller.checkpoint.safetensors_stream import ShardedTensors
from wandistiller.utils.system_memory import read_sizes

MIB = 2**20


def test_of_files_that_are_read_through_little_stays_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_stream, "MAPPED", 8 * MIB)
    for rank in range(2):
        pieces = {f"weights/{rank * MIB}/w{i}": torch.full((MIB,), float(i)) for i in range(16)}
        save_file(pieces, tmp_path / f"rank_{rank}.safetensors")
    del pieces
    tensors, most = ShardedTensors(tmp_path), 0
    before = read_sizes(Path("/proc/self/status"))["RssFile"]
    for i in range(16):
        value = tensors.read("weights", f"w{i}")
        assert value.shape == (2 * MIB,) and bool((value == i).all())
        most = max(most, read_sizes(Path("/proc/self/status"))["RssFile"] - before)
    assert most < 40 * MIB  # of 128
