"""The same short training on CPUs and on simulated GPUs."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ranks import metrics
from recipes import train
from simulated import Simulated

from wandistiller.data.text_cache import text_fingerprint

FLOAT32 = {"bf16": {"enabled": False}}


class Pair(NamedTuple):
    """Losses, gradient norms and the critic's numbers of all steps, and what the devices' checks found."""

    cpu: list[Any]
    gpu: list[Any]
    reports: str


def numbers(output: Path) -> list[Any]:
    """Loss, gradient norm and the critic's numbers of each step of a run."""
    return [(line["loss"], line["grad_norm"], line.get("critic")) for line in metrics(output)]


def take_texts_of_cpus(wan: Path, source: Path, target: Path) -> None:
    """Copy encoded prompts from a CPU's cache to a GPU's, which would encode them in bf16."""
    of_cpu, of_gpu = (text_fingerprint(wan, dtype) for dtype in (torch.float32, torch.bfloat16))
    shutil.copytree(source / "text" / of_cpu, target / "text" / of_gpu, dirs_exist_ok=True)


def on_both(folder: Path, wan: Path, ranks: int = 1, **more: Any) -> Pair:
    """Train three steps on CPUs, then on GPUs with the CPUs' text."""
    (reports := folder / "reports").mkdir()
    devices, more = Simulated(reports, gpus=ranks), {"max_steps": 3, **more}
    cpu = numbers(train(folder, wan, "cpu", ranks=ranks, **more))
    take_texts_of_cpus(wan, folder / "cache", folder / "cache")
    gpu = numbers(train(folder, wan, "gpu", ranks=ranks, accelerator=devices, **more))
    return Pair(cpu, gpu, devices.reports())
