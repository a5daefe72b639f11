"""Runs on the GPU, for tests marked gpu; in a rehearsal of them on the CPU or on a simulated GPU."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import train

KIND = "cuda" if torch.cuda.is_available() else "cpu"
REHEARSAL = bool(os.environ.get("REHEARSAL"))
not_rehearsed = pytest.mark.skipif(REHEARSAL, reason="only a GPU shows it")


def on_gpu(folder: Path, wan: Path, name: str = "run", ranks: int = 1, **more: Any) -> Path:
    """Train there; return the output folder."""
    return train(folder, wan, name, ranks=ranks, accelerator=KIND, **more)
