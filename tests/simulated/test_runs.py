"""Kinds of runs on simulated GPUs: losses of a CPU run, bit for bit, and no fault is reported."""

from pathlib import Path
from typing import Any

import pytest
from gpu_runs import FLOAT32, on_both
from image_data import image_data
from ranks import has_async_io
from recipes import student_engine
from simulated import simulated_gpu
from small_wan import IMAGE_FORMS, make_wan

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]

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
JOINT = [DMD2 | {"gan": 0.03}, {"name": "consistency", "intervals": 8, "edges": 2}]
FILES = read_json("ds_configs/teacher/files.json") | FLOAT32
INT8 = STREAMED | {"wandistiller": {"placement": "streamed", "weights": "int8"}}
RUNS |= {
    f"adapters on one base, {name}": ONE_BASE | {"teacher_deepspeed_config": teacher, "objective": objective}
    for name, teacher, objective in (
        ("replicated", {}, JOINT),
        ("streamed", STREAMED, JOINT),
        ("files", FILES, DMD2),
        ("streamed in 8 bits", INT8, DMD2),
    )
}

if has_async_io():
    RUNS["dmd2 on NVMe"] = {"objective": DMD2, "deepspeed_config": NVME}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_gpus_has_the_losses_of_one_on_cpus_bitwise(
    name: str, ranks: int, wan2: Path, tmp_path: Path
) -> None:
    found = on_both(tmp_path, wan2, ranks, **RUNS[name])
    assert found.gpu == found.cpu and found.reports == ""


@pytest.mark.parametrize("objective", ["velocity", DMD2 | {"gan": 0.03}], ids=["velocity", "dmd2"])
def test_two_gpus_that_share_each_sample_have_the_losses_of_two_cpus_bitwise(
    objective: Any, tmp_path: Path
) -> None:
    wan = make_wan(tmp_path / "wan", heads=4)
    found = on_both(tmp_path, wan, 2, context_parallel=2, num_frames=5, objective=objective)
    assert found.gpu == found.cpu and found.reports == ""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_an_image_to_video_run_on_gpus_has_the_losses_of_one_on_cpus_bitwise(
    form: str, ranks: int, tmp_path: Path
) -> None:
    data, wan = image_data(tmp_path / "data"), make_wan(tmp_path / "wan", **IMAGE_FORMS[form])
    rows = data.read_text().splitlines()  # the last is a clip, which has a last frame too
    data.write_text("\n".join(rows[-1:] if IMAGE_FORMS[form]["image"] == "both ends" else rows))
    given = {"data_path": str(data), "sample_prompts": ["left"], "rollout_steps": 2}
    given |= {"height": 32, "width": 64, "num_frames": 5, "teacher_deepspeed_config": STREAMED}
    objective = ["velocity", DMD2 | {"gan": 0.03}]
    found = on_both(tmp_path, wan, ranks, objective=objective, **given)
    assert found.gpu == found.cpu and found.reports == ""
