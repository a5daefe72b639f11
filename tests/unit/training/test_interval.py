"""Checkpoints and pictures by the clock, where a number of steps takes too long."""

from pathlib import Path

import pytest
from recipes import train

from wandistiller.training.interval import Interval


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_an_interval_is_over_when_its_minutes_have_passed_since_it_was_last_done() -> None:
    clock = Clock()
    interval = Interval(2, clock)
    clock.seconds += 119
    assert not interval.over()
    clock.seconds += 1
    assert interval.over()
    with interval.doing():
        assert interval.over()
    assert not interval.over()


def test_what_takes_long_is_done_in_at_most_a_tenth_of_the_time() -> None:
    clock = Clock()
    interval = Interval(1, clock)
    with interval.doing():
        clock.seconds += 60
    clock.seconds += 9 * 60 - 1
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
