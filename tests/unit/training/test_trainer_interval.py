"""Checkpoints and pictures by the clock, where a number of steps takes too long."""

from pathlib import Path

import pytest
from recipes import train

from wandistiller.training.trainer import DRAWING, SAVING, Interval


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_an_interval_is_over_when_its_minutes_have_passed_since_it_was_last_done() -> None:
    clock = Clock()
    interval = Interval(2, SAVING, clock)
    clock.seconds += 119
    assert not interval.over()
    clock.seconds += 1
    assert interval.over()
    with interval.doing():
        assert interval.over()
    assert not interval.over()


@pytest.mark.parametrize(("parts", "between"), [(SAVING, 9 * 60), (DRAWING, 19 * 60)])
def test_saving_takes_a_tenth_of_the_time_at_most_and_drawing_a_twentieth(parts: int, between: int) -> None:
    clock = Clock()
    interval = Interval(1, parts, clock)
    with interval.doing():
        clock.seconds += 60
    clock.seconds += between - 1
    assert not interval.over()
    clock.seconds += 1
    assert interval.over()


def test_what_took_long_once_and_is_quick_again_is_done_as_often_as_before() -> None:
    clock = Clock()
    interval = Interval(20, DRAWING, clock)
    for took, minutes in ((540, 171), (6, 20)):
        with interval.doing():
            clock.seconds += took
        clock.seconds += 60 * minutes - 1
        assert not interval.over()
        clock.seconds += 1
        assert interval.over()


@pytest.mark.slow
def test_ranks_save_after_a_step_and_draw_after_the_next_by_the_clock_of_rank_0(
    tmp_path: Path, wan1: Path
) -> None:
    shortest = {"save_minutes": 1e-6, "sample_minutes": 1e-6, "keep_checkpoints": 9}
    output = train(tmp_path, wan1, ranks=2, max_steps=4, sample_steps=1, **shortest)
    assert (output / "checkpoints/step_00000001").is_dir()
    assert (output / "samples/step_00000002.png").is_file()
