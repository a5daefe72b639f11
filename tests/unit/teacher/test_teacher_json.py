"""The teacher's JSON: what of it is not used is told in one line."""

import pytest

from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.teacher.teacher_json import read_placement


@pytest.mark.parametrize(("enabled", "told"), [(True, 1), (False, 0)])
def test_torch_autocast_of_a_teacher_is_told_to_be_unused(enabled: bool, told: int) -> None:
    section = {"enabled": enabled, "dtype": "bfloat16"}
    engine = read_placement(DeepSpeedJson("teacher.json", {"torch_autocast": section})).engine
    assert "torch_autocast" not in engine.raw and len(engine.overridden) == told
    assert all("`torch_autocast` in teacher.json is not used" in line for line in engine.overridden)
