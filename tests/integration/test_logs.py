"""The log of a run on stderr, and in a file for each rank."""

import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pytest import approx
from ranks import metrics, run, train_words, wandistiller
from recipes import recipe_file, student_engine

from wandistiller.cli.failures import Failures
from wandistiller.distributed.collectives import log0
from wandistiller.monitoring.metrics import scalars
from wandistiller.utils.logging import add_log_file, log_to_file, setup_logging


def test_each_rank_keeps_the_run_s_messages_with_the_time(finished: Path) -> None:
    for rank in range(2):
        lines = (finished / "logs" / f"rank_{rank}.log").read_text().splitlines()
        assert sum(" INFO step 4/4  loss " in line for line in lines) == 1
        assert all(len(line.split(" ")[0]) == len("2026-01-01") for line in lines if line)


def test_what_a_rank_was_doing_is_in_its_file_and_not_on_the_terminal(finished: Path) -> None:
    assert "doing: building the student" in (finished / "logs" / "rank_1.log").read_text()
    assert "doing:" not in finished.with_name("stderr").read_text()


def test_each_of_the_first_steps_has_a_line_with_loss_speed_memory_and_time_left_and_no_warning(
    finished: Path,
) -> None:
    text = finished.with_name("stderr").read_text()
    assert "WARNING" not in text and "Warning" not in text and "it/s]" not in text
    steps = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(steps) == 4
    assert all(word in step for step in steps for word in ("loss", "samples/s", "GiB on rank", "left"))


def test_a_run_that_goes_on_adds_to_its_files_and_half_a_character_is_kept_as_its_number(
    tmp_path: Path,
) -> None:
    for text in ("first", "a \ud800"):
        add_log_file(tmp_path / "rank_0.log")
        log_to_file(text)
    lines = (tmp_path / "rank_0.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["first", "\\ud800"]


@pytest.mark.parametrize(("level", "wanted"), [("info", "all\nalarm\n"), ("warning", "alarm\n")])
def test_what_the_terminal_leaves_out_is_in_the_file(
    level: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet_logging: None
) -> None:
    setup_logging(level)
    add_log_file(tmp_path / "rank_0.log")
    log0("all")
    log0("alarm", level=logging.WARNING)
    assert capsys.readouterr().err == wanted
    kept = (tmp_path / "rank_0.log").read_text().splitlines()
    assert [line.split()[-2:] for line in kept] == [["INFO", "all"], ["WARNING", "alarm"]]


def test_the_traceback_of_a_fault_of_ours_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_log_file(tmp_path / "rank_0.log")
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


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2])
def test_a_monitor_of_the_json_has_what_metrics_have_once_by_step(
    experts: int, wan1: Path, wan2: Path, tmp_path: Path
) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    small = {"num_layers": 1, "experts": ("one", "two")[experts - 1]}
    wan = (wan1, wan2)[experts - 1]
    lines = run_with({"csv_monitor": section}, wan, tmp_path, steps=4, student_config=small)
    wanted: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in scalars(line).items():
            wanted.setdefault(f"Train_{name.replace('/', '_')}.csv", []).append((line["step"], value))
    some = ("loss", "samples_per_second", "memory_gib_train_host_rank_0")
    assert {f"Train_{name}.csv" for name in some} <= wanted.keys()
    for name, values in wanted.items():
        rows = [row.split(",") for row in (tmp_path / "csv" / name).read_text().splitlines()[1:]]
        assert [(int(step), float(value)) for step, value in rows] == values, name
    assert not list(tmp_path.glob("csv/*Samples*"))


def run_with(
    monitor: dict[str, Any], wan: Path, folder: Path, env: dict[str, str] | None = None, **more: Any
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl after a run, or its continuation, whose student's JSON has this section."""
    more = {"max_steps": more.pop("steps", 3), "sample_every": 1, "save_every": 2, **more}
    file = recipe_file(folder, wan, deepspeed_config=student_engine(2, **monitor), **more)
    run(train_words(file), **env) if env else wandistiller("train", "--recipe", file)
    return metrics(folder / "run")


@pytest.mark.slow
def test_tensorboard_has_every_number_of_every_step_and_the_pictures(wan1: Path, tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
    )
    monitor = {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "board"}}
    lines = run_with(monitor, wan1, tmp_path)
    found = reader.EventAccumulator(str(tmp_path / "board"), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    assert {tag.removeprefix("Train/") for tag in found.Tags()["scalars"]} == {
        name for line in lines for name in scalars(line)
    }
    assert [(e.step, e.value) for e in found.Scalars("Train/loss")] == [
        (line["step"], approx(line["loss"])) for line in lines
    ]
    pictures = {e.step: pixels(io.BytesIO(e.encoded_image_string)) for e in found.Images("Samples")}
    drawn = {int(file.stem[5:]): pixels(file) for file in (tmp_path / "run" / "samples").glob("step_*.png")}
    assert pictures.keys() == drawn.keys()
    assert all(np.array_equal(pictures[step], drawn[step]) for step in drawn)


def pixels(file: Path | io.BytesIO) -> np.ndarray:
    return np.asarray(Image.open(file).convert("RGB"))


@pytest.mark.slow
def test_weights_and_biases_has_the_pictures_and_knows_a_run_that_goes_on(wan1: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install wandb")
    monitor = {"wandb": {"enabled": True, "project": "p"}}
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    run_with(monitor, wan1, tmp_path, env, steps=2)
    run_with(monitor, wan1, tmp_path, env, steps=3)
    name = (tmp_path / "run" / "wandb_run").read_text()
    runs = sorted((tmp_path / "wandb").glob(f"offline-run-*-{name}"))
    assert len(runs) == 2 and all(list(r.glob("files/media/images/Samples_*.png")) for r in runs)


def test_a_line_s_numbers_have_names_for_monitors() -> None:
    line = {"step": 7, "loss": 0.5, "grad_norm": None, "expert": "transformer", "skipped": True}
    line |= {"losses": {"velocity": 1.0}, "memory_gib": {"train": {"host": [1.0, 2.0]}}, "lr": float("nan")}
    of_ranks = {f"memory_gib/train/host/rank_{rank}": gib for rank, gib in enumerate((1.0, 2.0))}
    assert scalars(line) == {"loss": 0.5, "losses/velocity": 1.0} | of_ranks
