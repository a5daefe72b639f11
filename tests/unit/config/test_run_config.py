"""Paths as people write them: from the home folder, of a run in place of its student, of settings' files."""

from pathlib import Path

import pytest
from ranks import write_json
from recipes import recipe

from wandistiller.cli.main import main
from wandistiller.utils.files import at_home, read_json
from wandistiller.wan.pipeline import open_wan, student_of


def test_a_tilde_in_a_json_is_the_home_folder_wherever_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    given = {
        "teacher_path": "~/wan",
        "student_config": {"init": "~/runs/one"},
        "deepspeed_config": {"zero_optimization": {"offload_param": {"nvme_path": "~/swap"}}},
        "stages": [{"name": "few", "teacher_deepspeed_config": "~/teacher.json"}],
        "sample_prompts": ["~ a cat"],
        "negative_prompt": "~",
    }
    assert read_json(write_json(tmp_path / "r.json", given)) == {
        "teacher_path": "/home/me/wan",
        "student_config": {"init": "/home/me/runs/one"},
        "deepspeed_config": {"zero_optimization": {"offload_param": {"nvme_path": "/home/me/swap"}}},
        "stages": [{"name": "few", "teacher_deepspeed_config": "/home/me/teacher.json"}],
        "sample_prompts": ["~ a cat"],
        "negative_prompt": "~",
    }
    assert at_home({"output": Path("~/out"), "lr": 0.1}) == {"output": Path("/home/me/out"), "lr": 0.1}


@pytest.mark.usefixtures("one_rank", "quiet_logging")
def test_a_recipe_and_flags_with_a_tilde_run_in_the_home_folder(
    tmp_path: Path, wan2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "wan").symlink_to(wan2)
    given = recipe(tmp_path, wan2) | {"teacher_path": "~/wan", "output_dir": "~/out"}
    write_json(tmp_path / "r.json", given)
    assert main(["train", "--recipe=~/r.json", "--cache_dir=~/cache", "--dry_run"]) == 0
    assert f"into {tmp_path}/out" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path, wan1: Path) -> Path:
    """The folder of a run with its student."""
    (tmp_path / "run" / "resolved").mkdir(parents=True)
    write_json(tmp_path / "run" / "resolved" / "run.json", {})
    (tmp_path / "run" / "student").symlink_to(wan1)
    return tmp_path / "run"


def test_the_folder_of_a_run_stands_for_its_student(run: Path, wan1: Path) -> None:
    assert student_of(str(run)) == str(run / "student")
    assert student_of(str(wan1)) == str(wan1) and student_of("Wan-AI/Wan2.1") == "Wan-AI/Wan2.1"


@pytest.mark.usefixtures("one_rank", "quiet_logging")
def test_a_run_without_a_student_is_told_how_to_export_one(run: Path, capsys: pytest.CaptureFixture) -> None:
    (run / "student").unlink()
    assert main(["evaluate", "--student_path", str(run)]) == 2
    assert f"wandistiller export --checkpoint {run} --output students/mine" in capsys.readouterr().err


def test_a_run_as_the_teacher_is_told_where_its_student_is(run: Path) -> None:
    with pytest.raises(Exception, match=f"is the folder of a run. Give its student: {run}/student."):
        open_wan(str(run))
