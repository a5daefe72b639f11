"""Which pipeline the adapters of a run are for: the teacher, what the run began with, or none."""

from pathlib import Path
from typing import Any

import pytest

from wandistiller.checkpoint.facts import Facts
from wandistiller.export.formats.lora import LoraFormat, write_adapter_card
from wandistiller.export.source import Source
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.pipeline import open_wan


def of_adapters(wan: Path, run: Path, **more: Any) -> Source:
    numbers = {"max_steps": 5, "height": 64, "width": 64, "num_frames": 1, "steps": 4, "shift": 3.0}
    texts = {"teacher_path": str(wan), "transformer": open_wan(str(wan)).config.raw, "lora": {"rank": 4}}
    facts = Facts(**numbers | texts | {"experts": ["transformer"], "init": "teacher"} | more)
    return Source(run / "checkpoints" / "step_00000005", facts, {})


@pytest.mark.parametrize("init", ["teacher", "random"])
@pytest.mark.parametrize("name", ["lora", "lora.safetensors"])
def test_adapters_of_a_student_with_fewer_layers_are_refused_before_anything_is_read(
    name: str, init: str, wan1: Path, tmp_path: Path
) -> None:
    """There is no checkpoint here."""
    with pytest.raises(ConfigError, match="Leave out --adapter and --format lora"):
        LoraFormat().write(of_adapters(wan1, tmp_path / "run", init=init), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "base", "model"),
    [
        ({"bases": ["transformer"]}, "wan", "the teacher's model"),
        ({"init": "full", "before": ["5 steps of velocity"]}, "full/student", "the model of"),
        ({"init": "org/other"}, "org/other", "the model of"),
        ({"init": "full", "before": ["5 steps of velocity"], "lora": None}, "wan", "the teacher's model"),
    ],
    ids=["of the teacher", "of a run", "of another pipeline", "cut out of a difference"],
)
def test_the_card_names_the_pipeline_that_adapters_are_for_in_diffusers_and_comfyui(
    more: dict[str, Any], base: str, model: str, wan1: Path, tmp_path: Path
) -> None:
    base = wan1.name if base == "wan" else base
    source = of_adapters(wan1, tmp_path / "run", **more)
    write_adapter_card(tmp_path, source, "", "Rank 4", ["w.safetensors"], "w.card")
    text = (tmp_path / "README.md").read_text()
    named = f"{model} `{base}`" if model.endswith("of") else model
    assert f"into `models/loras`, for {named}." in text
    assert f'from_pretrained("{base}", torch_dtype=dtypes)' in text and f"For `{base}`, " in text
