"""The code of a LoRA's card on a simulated GPU that has no room for its network."""

import sys
from pathlib import Path

import pytest
from PIL import Image
from ranks import run
from simulated import Simulated, simulated_gpu
from small_wan import make_wan
from styles import style

from wandistiller.checkpoint.facts import Facts
from wandistiller.export.formats import lora
from wandistiller.export.source import Source
from wandistiller.wan.pipeline import open_wan

pytestmark = [pytest.mark.simulated, pytest.mark.slow, simulated_gpu]


@pytest.mark.parametrize(("whole", "mib"), [(10**9, 120), (0, 50)], ids=["a part", "a layer"])
def test_the_code_of_a_card_draws_on_a_small_gpu_as_it_is_written(
    whole: int, mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network of 70 MB in bf16; of the code only places are replaced."""
    wan = make_wan(tmp_path / "wan", experts=1, heads=32)
    file = style(wan, tmp_path / "w.safetensors", "to_q")
    numbers = {"max_steps": 5, "height": 32, "width": 32, "num_frames": 1, "steps": 2, "shift": 3.0}
    more = {"experts": ["transformer"], "bases": ["transformer"], "lora": {"rank": 4}, "init": "teacher"}
    texts = {"teacher_path": str(wan), "transformer": open_wan(str(wan)).config.raw}
    source = Source(tmp_path / "run" / "checkpoints" / "step_00000005", Facts(**numbers, **more, **texts), {})
    monkeypatch.setattr(lora, "WHOLE", whole)
    lora.write_adapter_card(tmp_path, source, str(tmp_path), "Rank 4", [file.name], "")
    code = (tmp_path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert ("sequential" in code) == (whole == 0)
    (tmp_path / "code.py").write_text(code.replace(f'"{wan.name}"', f'"{wan}"'))
    devices = Simulated(tmp_path, mib=mib)
    run([sys.executable, "code.py"], cwd=tmp_path, **devices.environment())
    assert Image.open(tmp_path / "image.png").size == (32, 32) and devices.reports() == ""
