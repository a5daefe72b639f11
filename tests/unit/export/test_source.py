"""What a run's folder stands for in `export` and `init`."""

from pathlib import Path

import pytest
from ranks import write_json

from wandistiller.export.source import read_source
from wandistiller.utils.errors import ConfigError


def test_a_last_stage_that_is_done_and_has_lost_its_checkpoints_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "resolved").mkdir()
    write_json(tmp_path / "resolved/run.json", {"stages": [{"name": "a"}, {"name": "b"}]})
    (tmp_path / "1_a/checkpoints/step_00000002").mkdir(parents=True)
    (tmp_path / "2_b").mkdir()
    write_json(tmp_path / "2_b/DONE", {})
    with pytest.raises(
        ConfigError, match=r"no checkpoint there \(2_b is its last stage; its student is in .*2_b"
    ):
        read_source(tmp_path)
