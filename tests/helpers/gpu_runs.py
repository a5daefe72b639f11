"""The same short training on CPUs and on simulated GPUs."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranks import metrics
from recipes import train
from simulated import Simulated

from wandistiller.data.text_cache import text_fingerprint

FLOAT32, DTYPES = {"bf16": {"enabled": False}}, (torch.float32, torch.bfloat16)


class Pair(NamedTuple):
    """Losses, gradient norms and the critic's numbers of three steps, and what the devices' checks found."""

    cpu: list[Any]
    gpu: list[Any]
    reports: str


def steps(folder: Path, wan: Path, name: str, where: str | Simulated, ranks: int, **more: Any) -> list[Any]:
    output = train(folder, wan, name, ranks=ranks, accelerator=where, max_steps=3, **more)
    return [(line["loss"], line["grad_norm"], line.get("critic")) for line in metrics(output)]


def on_both(folder: Path, wan: Path, ranks: int = 1, **more: Any) -> Pair:
    """Train on CPUs, then on GPUs with the CPUs' text, which GPUs would encode in bf16."""
    (reports := folder / "reports").mkdir()
    devices = Simulated(reports, gpus=ranks)
    cpu = steps(folder, wan, "cpu", "cpu", ranks, **more)
    texts, of_cpu, of_gpu = folder / "cache/text", *(text_fingerprint(wan, dtype) for dtype in DTYPES)
    shutil.copytree(texts / of_cpu, texts / of_gpu)
    return Pair(cpu, steps(folder, wan, "gpu", devices, ranks, **more), devices.reports())
