"""What a dry run finds missing on this machine."""

from dataclasses import replace
from pathlib import Path

import pytest
from planned import ONE_24, published_job
from ranks import write_json
from slow_cases import slow_but

from wandistiller.cli.main import main
from wandistiller.engine.ds_overrides import MICRO, TOTAL
from wandistiller.planner import disk
from wandistiller.planner.disk import shortages
from wandistiller.planner.machine import demands, moments
from wandistiller.planner.peak_memory import plan
from wandistiller.utils.files import read_json

SMALL = "--height 64 --width 64".split()
MANY = "--keep_checkpoints 1000000 --save_every 1 --max_steps 1000000".split()


@pytest.fixture
def paths(published: Path, tmp_path: Path, quiet_logging: None) -> list[str]:
    teacher = published / "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    return f"--teacher_path {teacher} --data_path {published}/prompts.txt --output_dir {tmp_path}/run".split()


@pytest.mark.parametrize("command", slow_but(["train"], ["train", "prepare"]))
def test_a_dry_run_names_missing_weights_and_too_small_a_disk_at_once(
    paths: list[str], command: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main([command, *paths, *MANY, *SMALL, "--dry_run"]) == 2
    text = capsys.readouterr().err
    for part in ("transformer", "vae", "text_encoder"):
        assert f"no .safetensors file in {part}/" in text
    assert "GiB of disk by its plan, and " in text and "describe it there (`--gpus`" in text
    assert "nothing was loaded" not in text and not (tmp_path / "run").exists()


@pytest.fixture
def large(tmp_path: Path) -> list[str]:
    """A run of the embedded teacher whose plan needs hundreds of times the memory of any machine."""
    ds = read_json("ds_configs/student/zero2.json") | {TOTAL: 8 * 10**6, MICRO: 10**6}
    file = write_json(tmp_path / "large.json", ds)
    flags = f"--teacher_path tiny --data_path tiny --output_dir {tmp_path}/run --deepspeed_config {file}"
    return flags.split()


@pytest.mark.parametrize("dry", slow_but([[]], [[], ["--dry_run"]]), ids=["real", "dry"])
def test_a_run_that_needs_far_more_memory_than_is_free_is_refused_with_a_remedy_and_nothing_written(
    large: list[str], dry: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["train", *large, *dry]) == 2
    text = capsys.readouterr().err
    assert "of CPU memory by its plan, and " in text and "--teacher_deepspeed_config auto" in text
    assert "`--despite_plan` starts the run nevertheless" in text and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_logging")
def test_who_insists_on_such_a_run_is_warned_alone(large: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["train", *large, "--dry_run", "--despite_plan"]) == 0
    assert "of CPU memory by its plan, and " in capsys.readouterr().err


def test_preparing_needs_nothing_of_what_training_takes(large: list[str]) -> None:
    assert main(["prepare", *large, "--dry_run"]) == 0


@pytest.mark.slow
def test_a_run_is_refused_from_a_fifth_over_what_is_free_on_and_warned_of_below(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its steps take most: text encoder and VAE give way where they do not fit
    engine = {"deepspeed_config": "ds_configs/student/zero2.json"}
    run = published_job(published, ONE_24, "Wan2.1-T2V-1.3B", num_frames=81, **engine)
    needs = demands(moments(plan(run, ONE_24)), ONE_24)[0].need
    found = {}
    for times in (0.99, 1.01, 1.19, 1.21):
        machine = replace(ONE_24, device_free=int(needs / times))
        monkeypatch.setattr(disk, "this_machine", lambda _, machine=machine: machine)
        short = shortages([run])
        found[times] = len(short.far), len(short.of_memory)
    assert found == {0.99: (0, 0), 1.01: (0, 1), 1.19: (0, 1), 1.21: (1, 0)}


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_logging")
def test_where_nothing_fits_that_could_be_recommended_the_table_says_why(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "mine.json"
    machine = "--gpus 1 --gpu_memory 4 --host_memory 8 --disk 10"
    paths = f"--teacher_path {published}/Wan-AI/Wan2.1-T2V-14B-Diffusers --data_path {published}/prompts.txt"
    assert main(["plan", *paths.split(), *machine.split(), "--recommend", str(file)]) == 2
    table, error = capsys.readouterr()
    assert "GPU, GiB" in table and "does NOT fit: it needs " in table
    assert error.splitlines()[-1].startswith("error: ") and "Nothing fits that could be recommended" in error


def test_a_recommendation_overwrites_no_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "mine.json"
    file.write_text("mine")
    assert main(["plan", "--teacher_path", "tiny", "--data_path", "tiny", "--recommend", str(file)]) == 2
    assert file.read_text() == "mine" and "is not overwritten" in capsys.readouterr().err


def test_a_place_where_no_recommendation_can_be_written_is_named_before_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "mine").write_text("mine")
    file = tmp_path / "mine" / "recipe.json"
    assert main(["plan", "--teacher_path", "tiny", "--data_path", "tiny", "--recommend", str(file)]) == 2
    text = capsys.readouterr().err
    assert f"`recommend` is {tmp_path / 'mine'}" in text and "is a file" in text and "machine " not in text
