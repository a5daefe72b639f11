"""Training on simulated GPUs: the losses and gradient norms of a CPU run."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from gpu_runs import FLOAT32, on_both
from on_ranks.tuning import waits_of_an_update
from ranks import STUDENTS, call, program, runs_here
from recipes import student_engine, train
from simulated import Simulated, simulated_gpu

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, simulated_gpu]


def test_a_student_on_a_gpu_learns_bitwise_what_one_on_a_cpu_learns(wan1: Path, tmp_path: Path) -> None:
    streamed = read_json("ds_configs/teacher/streamed.json") | FLOAT32
    short = {"max_steps": 2, "deepspeed_config": student_engine(3, train_batch_size=2), "sample_prompts": []}
    found = on_both(tmp_path, wan1, teacher_deepspeed_config=streamed, **short)
    assert found.gpu == found.cpu and found.reports == ""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("student", STUDENTS)
def test_every_student_json_learns_on_gpus_bitwise_what_it_learns_on_cpus(
    student: str, ranks: int, wan2: Path, tmp_path: Path
) -> None:
    if not runs_here(student):
        pytest.skip("no libaio here")
    engine = read_json(f"ds_configs/student/{student}.json") | FLOAT32
    del engine["scheduler"]  # its first steps would change nothing
    # without nvcc on both: DeepSpeed's own Adam for CPUs rounds otherwise
    engine["optimizer"]["params"] |= {} if "offload" in student else {"torch_adam": True, "fused": True}
    found = on_both(tmp_path, wan2, ranks, deepspeed_config=engine)
    assert found.gpu == found.cpu and found.reports == ""


@pytest.mark.slow
def test_a_step_waits_for_the_gpu_once_for_its_numbers_and_never_for_what_it_sends(
    wan2: Path, tmp_path: Path
) -> None:
    """Waits whose innermost line of the package draws, sends or gathers: three steps, on one rank."""
    devices = Simulated(tmp_path, waits=True)
    train(tmp_path, wan2, ranks=1, accelerator=devices, max_steps=3)
    places = Counter(wait.split("/wandistiller/")[1].split(":")[0] for wait in devices.waits("wandistiller"))
    assert places["training/step_result.py"] == 3
    assert not places["flow.py"] and not places["data/cached_dataset.py"] and not places["batch.py"]


@pytest.mark.slow
def test_an_update_with_an_offloaded_optimizer_waits_8_times_at_most(tmp_path: Path) -> None:
    """Of 8 adapters a layer, in one micro-step and in two, with their backward passes."""
    devices = Simulated(tmp_path, waits=True)
    start = partial(program, gpus=devices)
    few, many = (call(waits_of_an_update, layers, tmp_path, ranks=1, start=start)[0] for layers in (1, 3))
    assert few == many and 0 < min(few) and max(few) <= 8 and devices.reports() == ""
