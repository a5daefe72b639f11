"""Alarms, on curves and pictures that are known; and real runs, one that goes well and one whose learning rate climbs to 0.15."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from live import PATIENCE, live
from ranks import launcher, wandistiller, write_json
from recipes import recipe, student_engine
from torch import Tensor

from wandistiller.health import LONG, PACES, QUIET, SOON, Health, Spent, look

WELL = Spent(0.01, 0.02, 1.0)


def alarms(folder: Path, losses: list[float], norms: list[float] | None = None, spent: list[Spent] | None = None) -> list[str]:
    """The kinds that were said over such a run, one a step."""
    health = Health(folder)
    for step, loss in enumerate(losses, 1):
        health.step(step, loss, norms[step - 1] if norms else 1.0, 1e-4, spent or [WELL, WELL])
    return said(folder)


def said(folder: Path) -> list[str]:
    file = folder / "alarms.jsonl"
    return [json.loads(line)["kind"] for line in file.read_text().splitlines()] if file.is_file() else []


def test_a_loss_that_falls_raises_none(tmp_path: Path) -> None:
    assert alarms(tmp_path, [1 / step for step in range(1, 3 * LONG)]) == []


def test_a_loss_that_grows_to_three_times_its_least_is_said_once(tmp_path: Path) -> None:
    assert alarms(tmp_path, [1.0] * 20 + [4.0] * 100) == ["blow-up"]


def test_one_bad_step_is_no_blow_up(tmp_path: Path) -> None:
    assert alarms(tmp_path, [1.0] * 20 + [15.0] + [1.0] * 20) == []


def test_a_loss_that_stands_still_is_said_again_after_a_while(tmp_path: Path) -> None:
    assert alarms(tmp_path, [1.0 + 0.1 * (step % 2) for step in range(2 * LONG + QUIET)]) == ["plateau", "plateau"]
    assert "stands still" in (tmp_path / "alarms.jsonl").read_text()


def test_a_gradient_far_from_the_usual_is_said(tmp_path: Path) -> None:
    falling, usual = [1 / step for step in range(1, 102)], [1.0] * 100
    assert alarms(tmp_path, falling, [*usual, 25.0]) == ["gradient"]
    (tmp_path / "alarms.jsonl").unlink()
    assert alarms(tmp_path, falling, [*usual, 1e-4]) == ["no gradient"]
    (tmp_path / "alarms.jsonl").unlink()
    assert alarms(tmp_path, falling, [*usual, 15.0]) == []


def test_a_run_that_goes_on_forgets_alarms_of_steps_that_it_comes_to_again(tmp_path: Path) -> None:
    gradients = [*[1.0] * 100, 25.0]
    assert alarms(tmp_path, [1 / step for step in range(1, 102)], gradients) == ["gradient"]
    health = Health(tmp_path)
    health.go_on_from(101)
    assert (tmp_path / "alarms.jsonl").read_text().count("gradient norm") == 1
    health.go_on_from(100)
    assert not (tmp_path / "alarms.jsonl").read_text()


def test_a_run_goes_on_from_an_alarm_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "alarms.jsonl").write_text('{"step": 1, "kind": "data", "alarm": "a"}\n{"step": 2, "ki')
    Health(tmp_path).go_on_from(2)
    assert (tmp_path / "alarms.jsonl").read_text() == '{"step": 1, "kind": "data", "alarm": "a"}\n'


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    falling = [1 / step for step in range(1, PACES + 1)]
    assert alarms(tmp_path, falling, spent=[WELL, Spent(0.01, 0.04, 1.0), WELL]) == ["slow rank"]
    assert "Rank 1 takes 2.0 times as long as the others for the same work" in (tmp_path / "alarms.jsonl").read_text()


def test_a_rank_that_was_slow_for_a_moment_is_not_named(tmp_path: Path) -> None:
    health = Health(tmp_path)
    for step in range(1, 3 * PACES):
        health.step(step, 1 / step, 1.0, 1e-4, [WELL, Spent(0.01, 0.2 if step % PACES == 0 else 0.02, 1.0)])
    assert said(tmp_path) == []


def test_a_step_that_waits_for_its_data_is_said(tmp_path: Path) -> None:
    assert alarms(tmp_path, [1 / step for step in range(1, SOON + 1)], spent=[WELL, Spent(0.3, 0.02, 1.0)]) == ["data"]


def picture(contrast: float) -> list[Tensor]:
    """Half of the pixels below 0.5, half above."""
    return [torch.tensor([0.5 - contrast, 0.5 + contrast]).expand(3, 4, 2)]


def test_contrast_is_the_standard_deviation_and_clipped_pixels_are_counted() -> None:
    assert look(picture(0.25)).contrast == pytest.approx(0.25, rel=0.05) and look(picture(0.25)).clipped == 0
    assert look(picture(0.5)).clipped == 1


DRAWN = [((0.1, 0.1), ["contrast"]), ((0.05, 0.1), []), ((0.4, 0.5), ["contrast", "clipped"]), ((0.2, 0.25), []), ((0.1,), [])]
"""The student's contrast in each picture, the teacher's being 0.25, and what is said."""


@pytest.mark.parametrize(("contrasts", "kinds"), DRAWN)
def test_pictures_unlike_the_teacher_s_that_do_not_get_better_are_said(
    contrasts: tuple[float, ...], kinds: list[str], tmp_path: Path
) -> None:
    health = Health(tmp_path)
    for step, contrast in enumerate(contrasts):
        health.pictures(step, {"teacher": picture(0.25), "student": picture(contrast)})
    assert said(tmp_path) == kinds


def test_a_run_that_goes_well_raises_no_alarm_of_its_losses_and_gradients(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=SOON + 1, sample_every=5)
    wandistiller("train", "--recipe", write_json(tmp_path / "recipe.json", given), ranks=2)
    assert set(said(tmp_path / "run")) <= {"slow rank", "data", "contrast"}  # on a busy machine; an untrained student


def test_a_run_whose_learning_rate_climbs_too_far_says_that_its_loss_blows_up(tmp_path: Path, wan1: Path) -> None:
    climb = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_num_steps": 200, "warmup_type": "linear"}
    engine = student_engine(2, scheduler={"type": "WarmupLR", "params": climb})
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=30, deepspeed_config=engine)
    done = wandistiller("train", "--recipe", write_json(tmp_path / "recipe.json", given))
    assert "blow-up" in said(tmp_path / "run")
    assert re.search(r"ALARM +after step \d+: The loss has grown to .*, .* times the .* of step \d+", done.stderr)


def test_a_rank_that_other_work_slows_down_is_named(tmp_path: Path, wan1: Path) -> None:
    """Under ZeRO-3, where each rank waits for the others in its own forward pass."""
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=10000, sample_every=10000, save_every=10000,
                   deepspeed_config=student_engine(3))  # fmt: skip
    file = write_json(tmp_path / "recipe.json", given)
    with live([*launcher(2), "-m", "wandistiller", "train", "--recipe", str(file)], tmp_path / "log") as run:
        run.wait_for("step 1/")
        slow, until = run.pid_of_rank(1), time.monotonic() + PATIENCE
        while "slow rank" not in said(tmp_path / "run") and time.monotonic() < until:
            for _ in range(20):  # a third of its time is left to it
                os.kill(slow, signal.SIGSTOP)
                time.sleep(0.02)
                os.kill(slow, signal.SIGCONT)
                time.sleep(0.01)
    assert "slow rank" in said(tmp_path / "run") and "Rank 1 takes " in (tmp_path / "run" / "alarms.jsonl").read_text()
