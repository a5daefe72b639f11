"""Ranks that fall silent, on real processes: they may come back, or are dead after a stated time."""

import re
from pathlib import Path

import pytest
from on_ranks import absent
from on_ranks.suspended import never_goes_on, suspend
from ranks import call, program
from slow_cases import slow_but


@pytest.mark.parametrize("rank", slow_but([1], [0, 1]))
def test_a_rank_that_was_suspended_goes_on_and_so_do_the_others(rank: int) -> None:
    assert call(suspend, [rank], 1.0, 60.0, ranks=2) == [[10, 11], [10, 11]]


@pytest.mark.slow
def test_ranks_that_were_suspended_together_go_on_after_any_time() -> None:
    assert call(suspend, [1, 0], 2.0, 1.5, ranks=2) == [[10, 11], [10, 11]]


def test_a_rank_that_never_goes_on_ends_the_others_after_the_stated_time() -> None:
    with pytest.raises(AssertionError) as failed:
        call(never_goes_on, 5.0, ranks=2)
    text = str(failed.value)
    assert "exit codes [1, -9]" in text
    assert "because of rank 1. Rank 1 is gone" in text


def ends(number: int, when: str, folder: Path) -> str:
    """Exit codes and output of three ranks of which one fails."""
    with pytest.raises(AssertionError) as failed:
        program(Path(absent.__file__), folder, str(number), when, ranks=3)
    return str(failed.value)


@pytest.mark.parametrize("number", slow_but([0], [0, 2]))
def test_a_rank_that_fails_before_the_ranks_have_met_is_named_by_the_others_after_the_stated_time(
    number: int, tmp_path: Path
) -> None:
    text = ends(number, "before they meet", tmp_path)
    codes = [absent.CODE if rank == number else 1 for rank in range(3)]
    assert f"exit codes {codes}" in text
    where = rf"waiting for all 3 ranks at 127\.0\.0\.1:\d+; because of rank {number}"
    why = rf"These of 3 ranks are not at \S+ after \d+ s: {number}\. Their own last lines say why"
    told = re.findall(rf"rank (\d): stopped in: {where}\. {why}", text)
    assert told == [str(rank) for rank in range(3) if rank != number]


def test_a_rank_that_is_lost_between_the_meeting_and_the_first_collective_ends_the_others(
    tmp_path: Path,
) -> None:
    text = ends(2, "after they have met", tmp_path)
    assert f"exit codes [1, 1, {absent.CODE}]" in text and "because of rank 2. Rank 2 is gone" in text
