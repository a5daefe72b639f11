"""Steps on a simulated GPU: what they leave there, and what their stream waits for."""

from pathlib import Path

import measured_steps
import pytest
from gpu_runs import FLOAT32
from ranks import program
from recipes import recipe_file
from simulated import Simulated, simulated_gpu

from wandistiller.utils.files import read_json

pytestmark = [pytest.mark.simulated, simulated_gpu, pytest.mark.slow]


def test_a_step_leaves_nothing_on_the_gpu_and_the_stream_never_waits(wan2: Path, tmp_path: Path) -> None:
    (reports := tmp_path / "reports").mkdir()
    devices = Simulated(reports, waits=True)
    streamed = read_json("ds_configs/teacher/streamed.json") | FLOAT32
    file = recipe_file(tmp_path, wan2, max_steps=3, teacher_deepspeed_config=streamed)
    program(Path(measured_steps.__file__), "train", "--recipe", str(file), ranks=1, gpus=devices)
    before, *after = read_json(tmp_path / "run" / "in_tensors.json")["bytes"]
    assert after[-1] == before
    assert not any("network/block_source.py" in wait for wait in devices.waits("wandistiller"))
