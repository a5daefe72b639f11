"""What a dry run finds missing on this machine."""

from pathlib import Path

import pytest
from ranks import write_json

from wandistiller.cli.main import main
from wandistiller.engine.ds_overrides import MICRO, TOTAL
from wandistiller.utils.files import read_json

MANY = "--keep_checkpoints 1000000 --save_every 1 --max_steps 1000000".split()


@pytest.fixture
def paths(published: Path, tmp_path: Path, quiet_logging: None) -> list[str]:
    teacher = published / "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    return f"--teacher_path {teacher} --data_path {published}/prompts.txt --output_dir {tmp_path}/run".split()


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_dry_run_names_missing_weights_and_too_small_a_disk_at_once(
    paths: list[str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([command, *paths, *MANY, "--dry_run"]) == 2
    text = capsys.readouterr().err
    for part in ("transformer", "vae", "text_encoder"):
        assert f"no .safetensors file in {part}/" in text
    assert "GiB of disk by its plan, and " in text and "describe it there (`--gpus`" in text
    assert "nothing was loaded" not in text and not (tmp_path / "run").exists()


def test_a_dry_run_ends_with_an_error_if_its_plan_takes_more_memory_than_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ds = read_json("ds_configs/student/zero2.json") | {TOTAL: 8 * 10**6, MICRO: 10**6}
    file = write_json(tmp_path / "large.json", ds)
    flags = f"--teacher_path tiny --data_path tiny --output_dir {tmp_path}/run --deepspeed_config {file}"
    assert main(["train", *flags.split(), "--dry_run"]) == 2
    assert "of CPU memory by its plan, and " in capsys.readouterr().err


def test_a_recommendation_overwrites_no_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "mine.json"
    file.write_text("mine")
    assert main(["plan", "--teacher_path", "tiny", "--data_path", "tiny", "--recommend", str(file)]) == 2
    assert file.read_text() == "mine" and "is not overwritten" in capsys.readouterr().err
