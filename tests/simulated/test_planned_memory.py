"""Memory of runs on a simulated GPU, which is infinitely slow, next to what is planned for them."""

from functools import partial
from pathlib import Path
from typing import Any

import active_peaks
import planned
import pytest
import torch
from on_ranks import simulated_gpus
from ranks import STUDENTS, TEACHERS, call, has_async_io, program, runs_here, write_json
from simulated import Simulated, simulated_gpu
from small_wan import make_large_wan

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]

WIDTH, LAYERS = 512, 6
PIECES = 80
"""MiB for four streams, whose segments grow by 20 MiB: much beside networks of 100 MiB."""
TAKES_WHAT_IS_FREE = ("device_map_balanced", "device_map_sequential")
"""Placements whose memory is not planned."""
PAIRS = [(student, "streamed") for student in STUDENTS if runs_here(student)]
PAIRS += [("zero2_offload", name) for name in TEACHERS if name not in ("streamed", *TAKES_WHAT_IS_FREE)]
PAIRS = [pair for pair in PAIRS if not pair[1].endswith("nvme") or has_async_io()]
ROOMY = {"zero2": 1.35}
"""Student JSON -> the most by which its plan may exceed what it takes; else a tenth.

At stage 2 gradients come on a stream of their own, and what it has freed is planned as taken.
"""
LATE = {
    "lora_wan_clips": 1.65,
    "zero3_offload_64": 1.4,
    "zero3_offload": 1.35,
    "zero3": 1.15,
    "zero_inference_nvme": 1.2,
}
"""Student or teacher JSON, or its beginning -> the most by which a run may exceed its plan; else a tenth.

At stage 3 blocks, gradients and activations that the GPU has yet to finish with are not planned, nor are
checkpoints on their way to the CPU (deepspeed 0.19.8, `_ActivationOffloadEngine`); the device here is
infinitely slow.
"""


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned.pipeline(tmp_path_factory.mktemp("wan"), WIDTH, LAYERS)


def in_float32(kind: str, name: str) -> dict[str, Any]:
    return read_json(f"ds_configs/{kind}/{name}.json") | {"bf16": {"enabled": False}}


def peaks(given: dict[str, Any], devices: Simulated) -> dict[str, float]:
    """MiB in use by phase."""
    output = Path(given["output_dir"])
    file = write_json(output.with_suffix(".json"), given)
    program(Path(active_peaks.__file__), "train", "--recipe", file, "--despite_plan", ranks=1, gpus=devices)
    found = read_json(output / "memory.json")
    return {phase: 1024 * max(kinds.get("peak", [0])) for phase, kinds in found.items()}


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_a_run_fits_what_is_planned_for_it_and_a_tenth_and_takes_as_much(
    student: str, teacher: str, wan: Path, tmp_path: Path
) -> None:
    given = planned.recipe(tmp_path, wan, LAYERS, student, teacher, rollout_steps=1, sample_steps=1)
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    given["deepspeed_config"] = in_float32("student", student)
    given["teacher_deepspeed_config"] = in_float32("teacher", teacher)
    start = partial(program, gpus=Simulated(tmp_path))
    (plan,) = call(planned.predicted, given, 1, ranks=1, start=start)
    most = max(plan.values())
    above = next(
        (n for name, n in LATE.items() if f"{student} {teacher}".startswith(name) or name == teacher), 1.1
    )
    devices = Simulated(tmp_path, mib=int(above * most) + PIECES)
    found = peaks(given, devices)
    print(
        f"| {student} | {teacher} | {most} | {max(found.values()):.0f} | {most / max(found.values()):.3f} |"
    )
    assert most / ROOMY.get(student, 1.1) <= max(found.values()) <= above * most
    assert devices.reports() == ""


@pytest.mark.parametrize(
    ("student", "more", "but_last"),
    [
        ("lora_wan", {}, 0),
        ("lora_wan", {"gan": 0.03}, 0),
        ("lora_wan", {"shared": True}, 0),
        ("lora_wan", {"shared": True}, 3),
        ("lora_wan_clips", {}, 0),
    ],
)
def test_few_step_adapters_on_one_base_take_what_is_planned_where_activations_are_most(
    student: str, more: dict[str, Any], but_last: int, wan: Path, tmp_path: Path
) -> None:
    """Teacher and critic at samples, where nothing is recomputed yet, or a shared backward pass."""
    few = {"name": "dmd2", "steps": 2, "critic_updates": 1} | more
    given = planned.recipe(tmp_path, wan, 0, "", "", rollout_steps=1, sample_prompts=[])
    given |= {"student_config": {}, "lora": {"rank": 8}, "objective": few, "height": 192, "width": 256}
    engine = in_float32("student", student) | {"train_micro_batch_size_per_gpu": 4}
    engine["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    engine["wandistiller"] = {"checkpoint_but_last": but_last}
    given |= {"deepspeed_config": engine, "teacher_deepspeed_config": in_float32("teacher", "streamed")}
    (plan,) = call(planned.predicted, given, 1, ranks=1, start=partial(program, gpus=Simulated(tmp_path)))
    devices = Simulated(tmp_path, mib=8192)
    taken = peaks(given, devices)["train"]
    name = f"{student}, {more}, {but_last} blocks kept"
    print(f"| {name} | one base | {plan['train']} | {taken:.0f} | {plan['train'] / taken:.3f} |")
    assert plan["train"] / 1.11 <= taken <= LATE.get(student, 1.1) * plan["train"]
    assert devices.reports() == ""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four blocks of Wan 14B's sizes."""
    sizes = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 4}
    return make_large_wan(tmp_path_factory.mktemp("large") / "wan", torch.bfloat16, "10GB", **sizes)


@pytest.mark.parametrize("teacher", ["streamed", "zero_inference_cpu", "files"])
def test_a_teacher_of_a_14b_s_blocks_never_holds_more_than_is_planned_however_far_the_host_runs_ahead(
    teacher: str, large: Path, tmp_path: Path
) -> None:
    devices = Simulated(tmp_path, mib=8192)
    start = partial(program, gpus=devices)
    ((most, plan),) = call(simulated_gpus.call_often, large, teacher, 2, ranks=1, start=start)
    print(f"| four 14B blocks | {teacher} | {plan / 2**20:.0f} | {most / 2**20:.0f} | {plan / most:.3f} |")
    assert plan / 1.1 <= most <= 1.1 * plan and devices.reports() == ""
