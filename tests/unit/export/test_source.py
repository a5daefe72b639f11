"""What a run's folder stands for in `export` and `init`."""

from pathlib import Path

import pytest
from ranks import write_json

from wandistiller.checkpoint.facts import Facts
from wandistiller.export.source import Source, read_source
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


def test_a_run_s_teacher_and_its_lora_that_are_not_here_are_named_with_the_folder_to_start_in(
    wan1: Path, tmp_path: Path
) -> None:
    away = Source(tmp_path, Facts(teacher_path="models/wan"), {})
    with pytest.raises(ConfigError, match="No such folder is here: start in the folder"):
        away.teacher(weights=False)
    added = Source(tmp_path, Facts(teacher_path=str(wan1), teacher_lora=[{"file": "style.safetensors"}]), {})
    with pytest.raises(ConfigError, match="^style.safetensors: no such file. .* in the same folder"):
        added.base_teacher()
