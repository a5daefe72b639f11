"""A run killed again and again ends as an undisturbed one; bench/faults.py kills at random moments."""

import random
from pathlib import Path

import pytest
from faults import Campaign
from killed import LOADING, SAVE_EVERY, Kill

SAVING = "doing: saving the checkpoint of step 4"
BACKWARD = "doing: step 5, the student's backward pass"
CRITIC = "doing: step 4, the critic's backward pass"
EXPORT = "doing: exporting the student"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "precision", "kills"),
    [
        (
            1,
            "bf16",
            [Kill(SAVING, 1, 0.03, "all"), Kill(LOADING, 1, 0.05, "all"), Kill(EXPORT, 1, 0.03, "all")],
        ),
        (2, "float32", [Kill(BACKWARD, 2, 0.01, "rank")]),
    ],
)
def test_a_run_that_was_killed_leaves_byte_for_byte_what_an_undisturbed_one_does(
    ranks: int, precision: str, kills: list[Kill], tmp_path: Path
) -> None:
    small = Campaign(tmp_path, ranks, precision)
    small.measure()
    outcome = small.run("killed", kills, random.Random(0))
    assert outcome.wrong == []
    assert len(outcome.kills()) == len(kills), outcome.kills()
    assert max(lost for _, lost, _ in outcome.kills()) <= SAVE_EVERY


def test_a_recipe_in_stages_killed_in_each_of_them_leaves_what_an_undisturbed_one_does(
    tmp_path: Path,
) -> None:
    small = Campaign(tmp_path, 2, "float32", staged=True)
    small.measure()
    kills = [Kill(BACKWARD, 1, 0.01, "all"), Kill(SAVING, 2, 0.02, "rank"), Kill(CRITIC, 1, 0.01, "launcher")]
    outcome = small.run("killed", kills, random.Random(0))
    assert outcome.wrong == []
    assert len(outcome.kills()) == len(kills), outcome.kills()
    assert max(lost for _, lost, _ in outcome.kills()) <= SAVE_EVERY
