"""Alarms, on given curves; and, marked slow, on real runs."""

import json
import math
import re
from pathlib import Path

import pytest
from ranks import wandistiller, write_json
from recipes import recipe, student_engine

from wandistiller.monitoring.alarms import (
    LONG_WINDOW,
    REPEAT_AFTER,
    SHORT_WINDOW,
    WAITING,
    Alarms,
    Seconds,
)
from wandistiller.objectives.dmd2 import Dmd2

WELL = Seconds(0.01, 1.0)


def alarms(folder: Path, losses: list[float], norms: list[float] | None = None) -> list[str]:
    """Return the kinds of alarms raised by such a run, with one loss and norm a step."""
    alarms = Alarms(folder)
    for step, loss in enumerate(losses, 1):
        alarms.step(step, loss, norms[step - 1] if norms else 1.0, [WELL, WELL])
    return raised(folder)


def raised(folder: Path) -> list[str]:
    """Return the kinds of alarms in a run's alarms.jsonl."""
    file = folder / "alarms.jsonl"
    return [json.loads(line)["kind"] for line in file.read_text().splitlines()] if file.is_file() else []


FALLING = [1 / step for step in range(1, 102)]
LOSSES: dict[str, tuple[list[float], list[str]]] = {
    "falls": ([1 / step for step in range(1, 3 * LONG_WINDOW)], []),
    "grows to three times its least": ([1.0] * 20 + [4.0] * 100, ["blow-up"]),
    "is noisy": ([0.3, 0.3, 3.0, 3.0] * 5 + [0.3] * 10 + [3.0, 0.3] * 20, []),
    "has one bad step": ([1.0] * 20 + [15.0] + [1.0] * 20, []),
    "grows twice": ([1.0] * 20 + [4.0] * (REPEAT_AFTER + 10) + [16.0] * 20, ["blow-up"] * 2),
}


@pytest.mark.parametrize(("losses", "kinds"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_blows_up_raises_an_alarm_and_again_after_a_while(
    losses: list[float], kinds: list[str], tmp_path: Path
) -> None:
    assert alarms(tmp_path, losses) == kinds


HIGH = 0.0002
LOW = [
    *[0.011, 0.0047, 0.0082, 0.0015, 0.0059, 0.002, 0.024, 0.0025, 0.014, 0.0053, 0.038, 0.024, 0.009],
    *[0.0018, 0.073, 0.00068, 0.0017, 0.026, 0.056, 0.022, 0.015, 0.031, 0.015, 0.011, 0.038, 0.00047],
]
"""Losses by expert of consistency training of an image-to-video model, in the order of its steps."""
OF_HIGH = {1, 15, 17}
"""Steps of the high-noise expert."""


def two_experts(folder: Path, high: list[float], low: list[float], of_high: set[int]) -> list[str]:
    """Return the kinds of alarms raised by losses, which are the gradient norms as well, by expert."""
    alarms, left = Alarms(folder), {"transformer": high[::-1], "transformer_2": low[::-1]}
    for step in range(1, len(high) + len(low) + 1):
        expert = "transformer" if step in of_high else "transformer_2"
        loss = left[expert].pop()
        alarms.step(step, loss, loss, [WELL], expert=expert)
    return raised(folder)


def test_losses_of_a_real_run_of_two_experts_raise_no_alarm(tmp_path: Path) -> None:
    assert two_experts(tmp_path, [HIGH] * 3, LOW, OF_HIGH) == []


@pytest.mark.parametrize(("last", "kinds"), [(25.0, ["gradient"]), (1e-4, ["no gradient"]), (15.0, [])])
def test_an_unusual_gradient_raises_an_alarm(last: float, kinds: list[str], tmp_path: Path) -> None:
    assert alarms(tmp_path, FALLING, [*[1.0] * 100, last]) == kinds


def test_a_resumed_run_drops_alarms_of_repeated_steps_and_one_that_was_cut_off(tmp_path: Path) -> None:
    lines = [f'{{"step": {step}, "kind": "data", "alarm": "a"}}\n' for step in (1, 3)]
    (tmp_path / "alarms.jsonl").write_text("".join(lines) + '{"step": 4, "ki')
    Alarms(tmp_path).go_on_from(3, [])
    assert (tmp_path / "alarms.jsonl").read_text() == "".join(lines)
    Alarms(tmp_path).go_on_from(2, [])
    assert (tmp_path / "alarms.jsonl").read_text() == lines[0]


WATCHED = {"critic_lag": 0.2, "gradient": 0.8, "deviation": 1.0, "cosine": 0.9, "gap": 0.3}
GOES_WRONG: dict[str, tuple[dict, dict, int, list[str]]] = {
    "the critic lags at the start only": ({"watched": WATCHED | {"critic_lag": 0.8}}, {}, 40, []),
    "diverges": ({}, {"loss": 1.0}, 504, ["blow-up"]),
    "saturates": ({}, {"watched": WATCHED | {"deviation": 1.3}}, 510, ["saturation"]),
    "has one large gradient": ({}, {"grad_norm": 30.0}, 599, ["gradient", "student jumps"]),
    "is not finite at the start": ({"loss": None, "grad_norm": None}, {}, 40, []),
}
"""What the first and the last lines of a run hold, the last step of the first, and the kinds of alarms."""


def continued(folder: Path, lines: list[dict], stopped: int) -> list[str]:
    """Return the alarms' lines of a run that stops and goes on after a step."""
    folder.mkdir()
    for first, last in ((0, stopped), (stopped, len(lines))):
        alarms = Alarms(folder, Dmd2.limits)
        alarms.go_on_from(first, lines[:first])
        for line in lines[first:last]:
            loss = math.nan if line["loss"] is None else line["loss"]
            watched, expert = line["watched"], line["expert"]
            alarms.step(line["step"], loss, line["grad_norm"], [WELL], watched, expert)
    file = folder / "alarms.jsonl"
    return file.read_text().splitlines() if file.is_file() else []


@pytest.mark.parametrize(("first", "last", "until", "kinds"), GOES_WRONG.values(), ids=GOES_WRONG)
def test_a_run_that_stopped_raises_the_alarms_of_one_that_did_not(
    first: dict, last: dict, until: int, kinds: list[str], tmp_path: Path
) -> None:
    well = {"loss": 0.1, "grad_norm": 1.0, "expert": "transformer", "watched": WATCHED}
    lines = [{"step": s} | well | (first if s <= until else last) for s in range(1, 601)]
    for line in lines:
        line["watched"] = line["watched"] | {"exit": float(line["step"] % 4)}
    whole = continued(tmp_path / "whole", lines, 0)
    assert [json.loads(line)["kind"] for line in whole] == kinds
    assert continued(tmp_path / "stopped", lines, 500) == whole


WAITS = Seconds(0.3, 1.0)
STEPS = WAITING * SHORT_WINDOW
TIMES = {
    "one rank always waits": ([[WELL, WAITS]] * STEPS, ["data"]),
    "not long enough": ([[WELL, WAITS]] * (STEPS - 1), []),
    "another rank each time": ([[WAITS, WELL], [WELL, WAITS]] * STEPS, ["data"]),
    "every fifth step reads a whole file": ([*[[WELL]] * 4, [Seconds(4.0, 5.0)]] * STEPS, ["data"]),
    "busy for a while": ([[WAITS]] * (STEPS - SHORT_WINDOW) + [[WELL]] * SHORT_WINDOW, []),
    "one stall": ([[WELL]] * (STEPS - 1) + [[Seconds(500.0, 501.0)]], []),
    "a slow rank that reads fast": ([[WELL, Seconds(0.01, 5.0)]] * STEPS, []),
}


@pytest.mark.parametrize(("seconds", "kinds"), TIMES.values(), ids=TIMES)
def test_only_data_that_is_waited_for_all_the_time_raises_an_alarm(
    seconds: list[list[Seconds]], kinds: list[str], tmp_path: Path
) -> None:
    alarms = Alarms(tmp_path)
    for step, of_ranks in enumerate(seconds, 1):
        alarms.step(step, 1 / step, 1.0, of_ranks)
    assert raised(tmp_path) == kinds
    assert not kinds or re.search(r"\d\d% .* 0\.\d+ s a step", (tmp_path / "alarms.jsonl").read_text())


@pytest.mark.slow
def test_a_real_run_whose_learning_rate_is_too_high_raises_an_alarm(tmp_path: Path, wan1: Path) -> None:
    climb = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 200, "warmup_type": "linear"}
    engine = student_engine(2, scheduler={"type": "WarmupLR", "params": climb})
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=30, deepspeed_config=engine)
    done = wandistiller("train", "--recipe", write_json(tmp_path / "recipe.json", given))
    assert "blow-up" in raised(tmp_path / "run")
    assert re.search(r"ALARM +after step \d+: The loss has grown to .* times the .* of step \d+", done.stderr)


def test_each_expert_has_its_own_alarms(tmp_path: Path) -> None:
    high, low = [1.0] * 20 + [4.0] * 20, [30.0] * 30 + [300.0] * 10
    assert two_experts(tmp_path, high, low, set(range(1, 81, 2))).count("blow-up") == 2
    experts = [json.loads(line)["expert"] for line in (tmp_path / "alarms.jsonl").read_text().splitlines()]
    assert {*experts} == {"transformer", "transformer_2"}
