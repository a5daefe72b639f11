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


ON_ONE_BASE = [
    Kill("", 1, 1.0, "all"),
    Kill("doing: loading the teacher", 1, 0.02, "all"),
    Kill("doing: building the critic", 1, 0.01, "all"),
    Kill("doing: step 2, the critic's forward pass", 1, 0.01, "all"),
    Kill("doing: saving the checkpoint of step 2", 1, 0.05, "all"),
    Kill("doing: step 3, the student's sampling", 1, 0.0, "all"),
    Kill(CRITIC, 1, 0.01, "all"),
    Kill(LOADING, 1, 0.02, "all"),
    Kill(BACKWARD, 1, 0.01, "all"),
    Kill("doing: (step 5, the optimizer's step|finishing step 5)", 1, 0.0, "all"),
    Kill("doing: drawing pictures after step 6", 1, 0.02, "all"),
    Kill(EXPORT, 1, 0.05, "all"),
]
"""A kill in each phase, in the order of the run."""


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [(1, ON_ONE_BASE), (2, [Kill(CRITIC, 1, 0.01, "rank"), Kill(SAVING, 1, 0.02, "launcher")])],
)
def test_adapters_on_the_teacher_s_weights_killed_in_any_phase_leave_what_an_undisturbed_run_does(
    ranks: int, kills: list[Kill], tmp_path: Path
) -> None:
    small = Campaign(tmp_path, ranks, "float32", adapters=True)
    small.measure()
    outcome = small.run("killed", kills, random.Random(0))
    assert outcome.wrong == []
    assert len(outcome.kills()) == len(kills), outcome.kills()
    assert max(lost for _, lost, _ in outcome.kills()) <= SAVE_EVERY
