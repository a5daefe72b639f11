"""Memory of a simulated GPU: what a run takes of it, and how it ends when there is none left."""

from pathlib import Path

import pytest
from ranks import wandistiller
from recipes import recipe_file, train
from simulated import Simulated, simulated_gpu

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, simulated_gpu]


def test_a_small_student_takes_no_gpu_memory_for_gradients_that_it_does_not_have(
    wan2: Path, tmp_path: Path
) -> None:
    """DeepSpeed's buckets are 191 MiB by default."""
    output = train(tmp_path, wan2, ranks=1, accelerator=Simulated(tmp_path), max_steps=1)
    assert max(read_json(output / "memory.json")["train"]["peak"]) * 1024 < 80


SPENT = {
    "in the rollouts": (1, 2),
    "in the first measurement": (1, 26),
    "on both ranks": (2, 14),
    "on one of two ranks": (2, (4096, 14)),
}
"""When -> ranks, and MiB of their GPUs."""


@pytest.mark.slow
@pytest.mark.parametrize("when", SPENT)
def test_a_gpu_whose_memory_runs_out_ends_all_ranks_with_code_3_and_advice(
    when: str, wan2: Path, tmp_path: Path
) -> None:
    ranks, mib = SPENT[when]
    devices = Simulated(tmp_path, gpus=ranks, mib=mib)
    file = recipe_file(tmp_path, wan2, max_steps=1, height=256, width=256, num_frames=17)
    words = ["train", "--recipe", file, "--despite_plan"]
    error = wandistiller(*words, ranks=ranks, code=3, accelerator=devices).stderr
    assert devices.reports() == ""
    assert "Traceback" not in error and "Out of memory on rank" in error and "What helps:" in error
