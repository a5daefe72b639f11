"""The commands that a finished run names."""

import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from recipes import recipe
from trainers import job_of

from wandistiller.training.distil import _log_next

FEW: dict[str, Any] = {"name": "consistency", "edges": 4, "intervals": 20}


@pytest.mark.usefixtures("one_rank")
def test_after_adapters_for_one_number_of_steps_the_commands_are_of_that_number_and_alone_in_their_lines(
    wan1: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = job_of(
        recipe(
            tmp_path,
            wan1,
            output_dir=str(tmp_path / "run"),
            objective=FEW,
            lora={"rank": 2},
            student_config={},
        )
    )
    _log_next(job, tmp_path / "run")
    evaluate, _, export = ([*shlex.split(line)] for line in caplog.messages[-3:])
    assert evaluate[:3] == ["next", "wandistiller", "evaluate"] and "--steps" not in evaluate
    assert export[:2] == ["wandistiller", "export"] and export[-1] == "students/mine"
