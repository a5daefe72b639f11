"""The same short training on CPUs and on GPUs, simulated or real."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from image_data import image_data, with_last_images
from ranks import has_async_io, metrics
from recipes import student_engine, train
from simulated import Simulated
from small_wan import IMAGE_FORMS, make_wan

from wandistiller.data.conditions import text_fingerprint
from wandistiller.utils.files import read_json
from wandistiller.wan.pipeline import open_wan

FLOAT32 = {"bf16": {"enabled": False}}
NARROW = {"init": "random", "num_layers": 2, "attention_head_dim": 16}
DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 2, "critic_lr": 2e-3}
STREAMED = read_json("ds_configs/teacher/streamed.json") | FLOAT32
FEW = read_json("ds_configs/student/few_step_wan.json") | FLOAT32 | {"train_batch_size": 8}
NVME = read_json("ds_configs/student/zero3_nvme.json") | FLOAT32 | {"train_batch_size": 8}
for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "scheduler"):
    del NVME[key]
RUNS: dict[str, dict[str, Any]] = {
    "two experts, an average": {"student_config": {"num_layers": 2, "experts": "two"}, "ema": 0.5},
    "features": {"objective": ["velocity", {"name": "feature", "weight": 0.5}], "student_config": NARROW},
    "adapters": {"lora": {"rank": 2, "alpha": 2, "targets": ["to_q", "ffn.net.2"]}},
    "trajectory": {"objective": "trajectory"},
    "consistency": {"objective": {"name": "consistency", "intervals": 8, "edges": 2}},
    "dmd2": {"objective": DMD2},
    "dmd2 with heads": {"objective": DMD2 | {"gan": 0.03}},
    "few steps by the JSON of a 14B": {"objective": DMD2, "deepspeed_config": FEW, "lr": 1e-3},
    "merged padding": {"merge_text_padding": True},
    "streamed teacher, ZeRO-3": {
        "teacher_deepspeed_config": STREAMED,
        "deepspeed_config": student_engine(3),
    },
}
ONE_BASE = {"student_config": {}, "lora": {"rank": 2, "targets": ["to_q", "ffn.net.2"]}}
JOINT = [DMD2 | {"gan": 0.03, "sampler": "renoise"}, {"name": "consistency", "intervals": 8}]
FILES = read_json("ds_configs/teacher/files.json") | FLOAT32
INT8 = STREAMED | {"wandistiller": {"placement": "streamed", "weights": "int8"}}
RUNS |= {
    f"adapters on one base, {name}": ONE_BASE | {"teacher_deepspeed_config": teacher, "objective": objective}
    for name, teacher, objective in (
        ("replicated", {}, JOINT),
        ("streamed", STREAMED, JOINT),
        ("files", FILES, DMD2),
        ("files, ahead", FILES, "velocity"),  # of the next update while the adapters are updated
        ("streamed in 8 bits", INT8, DMD2 | {"shared": True, "carried": True}),
    )
}
if has_async_io():
    RUNS["dmd2 on NVMe"] = {"objective": DMD2, "deepspeed_config": NVME}


class Pair(NamedTuple):
    """Losses, gradient norms and the critic's numbers of all steps."""

    cpu: list[Any]
    gpu: list[Any]


class Checked(NamedTuple):
    """The same, and what the checks of simulated GPUs found."""

    cpu: list[Any]
    gpu: list[Any]
    reports: str


def numbers(output: Path) -> list[Any]:
    """Loss, gradient norm and the critic's numbers of each step of a run."""
    return [(line["loss"], line["grad_norm"], line.get("critic")) for line in metrics(output)]


def take_texts_of_cpus(wan: Path, source: Path, target: Path) -> None:
    """Copy encoded prompts from a CPU's cache to a GPU's, which would encode them in bf16."""
    folder = open_wan(str(wan))
    of_cpu, of_gpu = (text_fingerprint(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    shutil.copytree(source / "text" / of_cpu, target / "text" / of_gpu, dirs_exist_ok=True)


def on_cpu_and(gpus: str | Simulated, folder: Path, wan: Path, ranks: int = 1, **more: Any) -> Pair:
    """Train three steps on CPUs, then on GPUs with the CPUs' text."""
    more = {"max_steps": 3, **more}
    cpu = numbers(train(folder, wan, "cpu", ranks=ranks, **more))
    take_texts_of_cpus(wan, folder / "cache", folder / "cache")
    return Pair(cpu, numbers(train(folder, wan, "gpu", ranks=ranks, accelerator=gpus, **more)))


def on_both(folder: Path, wan: Path, ranks: int = 1, **more: Any) -> Checked:
    """Train on CPUs and on simulated GPUs."""
    (reports := folder / "reports").mkdir()
    devices = Simulated(reports, gpus=ranks)
    return Checked(*on_cpu_and(devices, folder, wan, ranks, **more), devices.reports())


def image_run(form: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Make a small image-to-video Wan of this form and its data; return it and a run's keys."""
    data, wan = image_data(folder / "data"), make_wan(folder / "wan", **IMAGE_FORMS[form])
    data = with_last_images(data) if IMAGE_FORMS[form]["image"] == "both ends" else data
    settings = {"data_path": str(data), "sample_prompts": ["left"], "rollout_steps": 2}
    settings |= {"height": 32, "width": 64, "num_frames": 5, "teacher_deepspeed_config": STREAMED}
    return wan, settings | {
        "objective": [{"name": "consistency"}, DMD2 | {"gan": 0.03, "sampler": "renoise"}]
    }
