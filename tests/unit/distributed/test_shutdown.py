"""Requests to stop: one line at once, and the third ends the process."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_run import PATIENCE, background_run

from wandistiller.distributed import shutdown
from wandistiller.distributed.shutdown import ShutdownListener
from wandistiller.utils.logging import activity, begin_step, current, set_activity

pytestmark = pytest.mark.usefixtures("one_rank")
PRESS_THREE_TIMES = """
import os, signal, time
from wandistiller.distributed import shutdown
from wandistiller.utils.logging import set_activity, setup_logging
setup_logging("info")
shutdown.SAME_REQUEST_SECONDS = 0
set_activity("loading the teacher")
shutdown.stopping.install(None)
for _ in range(3):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
time.sleep(900)
"""


@pytest.fixture
def listener() -> Iterator[ShutdownListener]:
    listening = ShutdownListener()
    listening.install(None)
    yield listening
    listening.release()


def until(condition: Callable[[], object]) -> None:
    patience = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < patience:
        time.sleep(0.01)
    assert condition()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines for the terminal."""
    return [record.getMessage() for record in caplog.records if record.name == "wandistiller"]


def ask(listening: ShutdownListener, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    until(lambda: listening.reason)


def test_a_signal_is_answered_by_a_thread_as_the_main_one_may_compute(
    listener: ShutdownListener, caplog: pytest.LogCaptureFixture
) -> None:
    set_activity("loading the teacher")
    ask(listener, signal.SIGUSR1)
    until(lambda: said(caplog))
    text = "what runs now (loading the teacher); twice more ends it now, without saving"
    assert said(caplog) == [f"SIGUSR1: stopping after {text}"]
    assert caplog.records[-1].thread != threading.main_thread().ident


def test_a_signal_that_a_launcher_forwards_is_no_second_request(
    listener: ShutdownListener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "SAME_REQUEST_SECONDS", PATIENCE)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):  # a terminal's, torchrun's, deepspeed's
        ask(listener, number)
        time.sleep(0.1)
    until(lambda: said(caplog))
    assert len(said(caplog)) == 1 and listener.reason == "SIGINT"


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second passes while a test counts them, however busy the machine is."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)


@pytest.mark.usefixtures("stopped_clock")
def test_the_line_names_the_step_and_the_time_that_the_last_one_took(
    listener: ShutdownListener, caplog: pytest.LogCaptureFixture
) -> None:
    begin_step(11)
    current.seconds = {"the teacher's forward pass": 40.0, "the optimizer's step": 2.9}
    begin_step(12)
    with activity("the student's backward pass"):
        listener.request_stop("OUTPUT/STOP")
    assert said(caplog) == ["OUTPUT/STOP: stopping after step 12 and its checkpoint, about 43 s"]


def test_a_node_s_other_ranks_say_nothing(
    listener: ShutdownListener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    caplog.set_level(logging.INFO)
    listener.request_stop("SIGTERM")
    assert said(caplog) == [] and listener.reason == "SIGTERM"


def test_the_third_request_ends_the_process_with_the_exit_code_of_a_shell(tmp_path: Path) -> None:
    with background_run([sys.executable, "-c", PRESS_THREE_TIMES], tmp_path / "log") as run:
        assert run.end() == 128 + signal.SIGINT
        assert run.output().splitlines() == [
            "SIGINT: stopping after what runs now (loading the teacher); "
            "twice more ends it now, without saving",
            "SIGINT: once more ends it now, without saving",
            "ended by SIGINT, without saving",
        ]
