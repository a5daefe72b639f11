"""Ranks that fall silent, on real processes: they may come back, or are dead after a stated time."""

import pytest
from on_ranks.suspended import never_goes_on, suspend
from ranks import call


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_was_suspended_goes_on_and_so_do_the_others(rank: int) -> None:
    assert call(suspend, [rank], 1.0, 0.4, 60.0, ranks=2) == [[10, 11], [10, 11]]


@pytest.mark.slow
def test_ranks_that_were_suspended_together_go_on_after_any_time() -> None:
    assert call(suspend, [1, 0], 2.0, 0.4, 1.5, ranks=2) == [[10, 11], [10, 11]]


def test_a_rank_that_never_goes_on_ends_the_others_after_the_stated_time() -> None:
    with pytest.raises(AssertionError) as failed:
        call(never_goes_on, 0.6, 1.0, ranks=2)
    text = str(failed.value)
    assert "exit codes [1, -9]" in text
    assert "Rank 1 has been silent for 1 s: is it suspended? After 1 s the run ends." in text
    assert "because of rank 1. Rank 1 is gone" in text
