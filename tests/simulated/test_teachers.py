"""Every shipped teacher JSON on simulated GPUs: bitwise diffusers' velocities and hidden states on a CPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from on_ranks import simulated_gpus
from on_ranks.placements import differences
from ranks import TEACHERS, call, has_async_io, program
from simulated import Simulated, simulated_gpu
from transformers import UMT5Config, UMT5EncoderModel

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


def on_gpus(ranks: int, wan: Path, work: Path, tasks: list[str]) -> dict[str, float]:
    """What differs most over the ranks, each with a GPU; nothing may be reported."""
    devices = Simulated(work, gpus=2)
    found = call(differences, wan, work, tasks, ranks=ranks, start=partial(program, gpus=devices))
    assert devices.reports() == ""
    return {task: max(of_rank[task] for of_rank in found) for task in tasks}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [n for n in TEACHERS if n != "zero_inference_nvme" or has_async_io()])
def test_every_placement_is_bitwise_diffusers_on_gpus(
    name: str, ranks: int, wan2: Path, tmp_path: Path
) -> None:
    tasks = [f"{name} {precision} {passes}" for precision in ("float32", "bfloat16") for passes in (1, 2)]
    assert on_gpus(ranks, wan2, tmp_path, tasks) == dict.fromkeys(tasks, 0)


def test_a_streamed_teacher_is_freed_after_its_last_copy_and_leaves_nothing(
    wan2: Path, tmp_path: Path
) -> None:
    devices = Simulated(tmp_path)
    start = partial(program, gpus=devices)
    assert call(simulated_gpus.free_teacher_in_use, wan2, ranks=1, start=start) == [0]
    assert devices.reports() == ""


def test_the_thread_that_reads_blocks_uses_the_gpu_of_its_rank_alone(wan2: Path, tmp_path: Path) -> None:
    start = partial(program, gpus=Simulated(tmp_path, gpus=2))
    assert call(simulated_gpus.gpus_of_reads, wan2, ranks=2, start=start) == [{0}, {1}]


def test_a_text_encoder_that_does_not_fit_the_gpu_gives_the_same_bits_from_cpu_memory(
    wan2: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    """A layer has 20,736 bytes, of which two are left free, and accelerate keeps room for a third."""
    folder, devices = copy_of(wan2), Simulated(tmp_path)
    config = UMT5Config(**read_json(folder / "text_encoder" / "config.json") | {"num_layers": 12})
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    (whole_LD, all_of_it), (text_LD, half), (on_cpu_LD, nothing) = (
        call(simulated_gpus.encoded_text, folder, room, ranks=1, start=partial(program, gpus=devices))[0]
        for room in (2**30, 200_000, 10_000)
    )
    assert torch.equal(text_LD, whole_LD) and torch.equal(on_cpu_LD, whole_LD)
    assert nothing == 0 < half < 200_000 < all_of_it
    assert devices.reports() == ""
