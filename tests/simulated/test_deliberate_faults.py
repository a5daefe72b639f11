"""Faults that are put into the package on purpose, each found by what the simulated GPU shows."""

from pathlib import Path

import faulty
import pytest
from gpu_runs import FLOAT32
from ranks import program
from recipes import recipe_file
from simulated import Simulated, simulated_gpu

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, simulated_gpu, pytest.mark.slow]


def run(fault: str, wan: Path, folder: Path) -> Simulated:
    """Three steps with a streamed teacher and this fault; the devices, with their waits."""
    (reports := folder / "reports").mkdir()
    devices = Simulated(reports, waits=True)
    streamed = read_json("ds_configs/teacher/streamed.json") | FLOAT32
    file = recipe_file(folder, wan, max_steps=3, teacher_deepspeed_config=streamed)
    program(Path(faulty.__file__), fault, "train", "--recipe", str(file), ranks=1, gpus=devices)
    return devices


def test_a_step_leaves_nothing_on_the_gpu_and_the_stream_never_waits(wan2: Path, tmp_path: Path) -> None:
    devices = run("none", wan2, tmp_path)
    before, *after = read_json(tmp_path / "run" / "in_tensors.json")["bytes"]
    assert after[-1] == before
    assert not any("network/block_source.py" in wait for wait in devices.waits("wandistiller"))


def test_a_batch_that_is_kept_a_step_too_long_is_found_in_the_memory(wan2: Path, tmp_path: Path) -> None:
    run("kept", wan2, tmp_path)
    before, *after = read_json(tmp_path / "run" / "in_tensors.json")["bytes"]
    assert after[-1] > before


def test_copies_from_memory_that_is_not_locked_are_waits_of_the_stream(wan2: Path, tmp_path: Path) -> None:
    devices = run("locked", wan2, tmp_path)
    assert any("network/block_source.py" in wait for wait in devices.waits("wandistiller"))


def test_what_is_not_sent_to_the_gpu_ends_the_run(wan2: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit codes.*(?s:.*)same device"):
        run("sent", wan2, tmp_path)
