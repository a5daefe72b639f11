"""Progress on a terminal and in a log."""

import fcntl
import logging
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
from background_run import PATIENCE

from wandistiller.distributed import progress
from wandistiller.distributed.progress import Progress
from wandistiller.monitoring.memory_usage import Usage
from wandistiller.monitoring.metrics import EACH, Metrics, read_lines
from wandistiller.utils.logging import log, set_activity, setup_logging

pytestmark = pytest.mark.usefixtures("one_rank")


def on_a_terminal(run: Callable[[], object], columns: int = 120) -> str:
    """What `run` writes to stderr, which is a pseudo-terminal."""
    above, below = pty.openpty()
    fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    with os.fdopen(below, "w") as stderr, patch.object(sys, "stderr", stderr):
        run()
    text = b""
    with suppress(OSError):  # so does the kernel say that the other end is closed and all is read
        while part := os.read(above, 2**16):
            text += part
    os.close(above)
    return text.decode()


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = logging.root.handlers[:]
    yield
    logging.root.handlers[:] = before


def train(file: Path, steps: int, **values: object) -> None:
    metrics = Metrics(file, start=0, max_steps=steps, global_batch=4)
    for step in range(1, steps + 1):
        metrics.step(step, {"loss": 0.5, "lr": 1e-3} | values, {"train": [Usage(1, 1)]}, 0.25)


def advance(steps: int) -> None:
    task = Progress("samples", steps)
    for _ in range(steps):
        task.advance()


@pytest.mark.parametrize("columns", [120, 0], ids=["", "of a size that is not known"])
def test_a_terminal_has_one_line_that_rewrites_itself(columns: int) -> None:
    text = on_a_terminal(lambda: advance(3), columns)
    assert text.count("\n") == 1 and "\r" in text and "samples: 100%" in text and "3/3" in text


def test_lines_of_the_log_stand_above_the_bar() -> None:
    def run() -> None:
        setup_logging("info")
        task = Progress("samples", 2)
        task.advance()
        log.warning("ALARM")
        task.advance()

    assert "\rALARM\r\n" in on_a_terminal(run)


def test_the_bar_of_training_has_loss_and_speed(tmp_path: Path) -> None:
    text = on_a_terminal(lambda: train(tmp_path / "metrics.jsonl", 30))
    assert text.count("\n") == 1 and "train: 100%" in text
    assert "loss 0.50000" in text and "16.0 samples/s" in text


def test_without_a_terminal_each_of_the_first_steps_then_every_tenth_and_the_last_has_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path / "metrics.jsonl", 34)
    steps = [int(m.split("/")[0].split()[1]) for m in caplog.messages if m.startswith("step ")]
    assert steps == [*range(1, EACH + 1), 20, 30, 34]
    assert "s since step 20" in caplog.messages[-2] and "since" not in caplog.messages[3]
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 34
    assert "\r" not in capsys.readouterr().err


def test_a_skipped_step_always_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    train(tmp_path / "metrics.jsonl", 34, skipped=True)
    assert sum("SKIPPED" in m for m in caplog.messages) == 34


def test_a_long_silence_is_broken_by_what_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "SILENCE_SECONDS", 0.0)
    set_activity("compiling")
    ended = progress.break_silence()
    until = time.monotonic() + PATIENCE
    while "compiling: " not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    ended.set()
    assert "still      compiling: " in caplog.text


def test_units_that_were_done_before_are_no_part_of_the_total(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    task = Progress("pictures", 4, first_line=0)
    task.skip(2)
    double = task.counting(lambda x: 2 * x)
    assert [double(1), double(2)] == [2, 4]
    assert caplog.messages[-1].startswith("pictures: 2/2, ")
