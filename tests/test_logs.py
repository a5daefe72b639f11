"""What a run says on stderr, and keeps in a file for each rank."""

import json
import logging
import sys
import zipfile
from pathlib import Path

import pytest
from ranks import run, wandistiller, write_json
from recipes import recipe, student_engine

from wandistiller import logs
from wandistiller.distributed import log0
from wandistiller.failures import Failures
from wandistiller.metrics import scalars


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> tuple[Path, str]:
    """The output folder of a run on two ranks that was stopped by nothing, and its stderr."""
    folder = tmp_path_factory.mktemp("logs")
    given = recipe(folder, wan1, output_dir=str(folder / "run"), max_steps=3)
    return folder / "run", wandistiller("train", "--recipe", write_json(folder / "recipe.json", given), ranks=2).stderr


def test_each_rank_keeps_what_the_run_says_with_the_time(said: tuple[Path, str]) -> None:
    for rank in range(2):
        lines = (said[0] / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert sum(" INFO step 3/3  loss " in line for line in lines) == 1
        assert all(len(line.split(" ")[0]) == len("2026-01-01") for line in lines if line)


def test_what_a_rank_was_doing_is_in_its_file_and_not_on_the_terminal(said: tuple[Path, str]) -> None:
    output, stderr = said
    assert "doing: building the student" in (output / "logs" / "rank_1.log").read_text() and "doing:" not in stderr


def test_libraries_say_nothing_in_a_run_where_all_is_well(said: tuple[Path, str]) -> None:
    assert "WARNING" not in said[1] and "Warning" not in said[1] and "it/s]" not in said[1]


def test_there_is_one_line_a_step_with_loss_speed_memory_and_time_left(said: tuple[Path, str]) -> None:
    steps = [line for line in said[1].splitlines() if line.startswith("step ")]
    assert len(steps) == 3 and all("loss" in s and "samples/s" in s and "GiB on rank" in s and "left" in s for s in steps)


def test_a_run_that_goes_on_adds_to_its_files(said: tuple[Path, str], tmp_path: Path) -> None:
    for text in ("first", "second"):
        logs.to_file(tmp_path / "rank_0.log")
        logs.keep(text)
    assert [line.split()[-1] for line in (tmp_path / "rank_0.log").read_text().splitlines()] == ["first", "second"]


def test_half_a_character_is_kept_as_its_number(tmp_path: Path) -> None:
    logs.to_file(tmp_path / "rank_0.log")
    logs.keep("a \ud800 b")
    assert (tmp_path / "rank_0.log").read_text().endswith("a \\ud800 b\n")


@pytest.mark.parametrize(("level", "wanted"), [("info", "all\nalarm\n"), ("warning", "alarm\n")])
def test_what_the_terminal_leaves_out_is_in_the_file(
    level: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_logging: None
) -> None:
    logs.start(level)
    logs.to_file(tmp_path / "rank_0.log")
    log0("all")
    log0("alarm", level=logging.WARNING)
    assert capsys.readouterr().err == wanted
    kept = (tmp_path / "rank_0.log").read_text().splitlines()
    assert [line.split()[-2:] for line in kept] == [["INFO", "all"], ["WARNING", "alarm"]]


def test_the_traceback_of_a_fault_of_ours_is_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.to_file(tmp_path / "rank_0.log")
    try:
        {}["absent"]
    except KeyError as error:
        Failures().report(error)
    kept = (tmp_path / "rank_0.log").read_text()
    assert "Traceback (most recent call last)" in kept and "KeyError: 'absent'" in kept and __file__ in kept


@pytest.fixture(autouse=True)
def _no_files_afterwards() -> None:
    yield
    for name in ("wandistiller", "DeepSpeed", "wandistiller.file"):
        logger = logging.getLogger(name)
        for handler in [h for h in logger.handlers if isinstance(h, logging.FileHandler)]:
            logger.removeHandler(handler)


@pytest.mark.parametrize("experts", [1, 2])
def test_a_monitor_of_the_json_has_what_metrics_have_once_by_step(
    experts: int, wan1: Path, wan2: Path, tmp_path: Path
) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    given = recipe(tmp_path, (wan1, wan2)[experts - 1], output_dir=str(tmp_path / "run"), max_steps=4,
                   student_config={"num_layers": 1, "experts": ("one", "two")[experts - 1]},
                   deepspeed_config=student_engine(2, csv_monitor=section))  # fmt: skip
    wandistiller("train", "--recipe", write_json(tmp_path / "r.json", given))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in scalars(line).items():
            wanted.setdefault(f"Train_{name.replace('/', '_')}.csv", []).append((line["step"], value))
    assert {"Train_loss.csv", "Train_samples_per_second.csv", "Train_memory_gib_train_host_rank_0.csv"} <= wanted.keys()
    for name, values in wanted.items():
        rows = [row.split(",") for row in (tmp_path / "csv" / name).read_text().splitlines()[1:]]
        assert [(int(step), float(value)) for step, value in rows] == values, name
    assert not list(tmp_path.glob("csv/*Samples*"))


def test_a_line_s_numbers_have_names_for_monitors() -> None:
    line = {"step": 7, "loss": 0.5, "grad_norm": None, "expert": "transformer", "skipped": True, "losses": {"velocity": 1.0},
            "memory_gib": {"train": {"host": [1.0, 2.0]}}, "lr": float("nan")}  # fmt: skip
    assert scalars(line) == {"loss": 0.5, "losses/velocity": 1.0, "memory_gib/train/host/rank_0": 1.0,
                             "memory_gib/train/host/rank_1": 2.0}  # fmt: skip


def test_comet_has_every_step_when_the_process_has_ended(wan1: Path, tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="pip install comet_ml")
    engine = student_engine(2, comet={"enabled": True, "online": False})
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=3, deepspeed_config=engine)
    words = [sys.executable, "-m", "wandistiller", "train", "--recipe", str(write_json(tmp_path / "r.json", given))]
    run(words, COMET_OFFLINE_DIRECTORY=str(tmp_path / "comet"))
    (archive,) = (tmp_path / "comet").glob("*.zip")
    messages = [json.loads(line)["payload"] for line in zipfile.ZipFile(archive).read("messages.json").splitlines()]
    metrics = [m["metric"] for m in messages if m.get("metric", {}).get("metricName") == "Train/loss"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["metricValue"]) for m in metrics] == [(line["step"], line["loss"]) for line in lines]
