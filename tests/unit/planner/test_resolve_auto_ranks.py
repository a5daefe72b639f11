"""`auto` on ranks whose nodes differ: one choice, or one message on all of them."""

from pathlib import Path

import pytest
from on_ranks.agreeing import chosen_on_two
from ranks import call
from recipes import recipe
from slow_cases import slow_but

DIFFERS = "`auto` differs, as nodes can build different JSONs: student as given, teacher "


@pytest.mark.parametrize(
    ("rank_1", "begins"),
    slow_but(
        [("less", DIFFERS)],
        [("less", DIFFERS), ("nothing", "No JSONs of ds_configs/ fit. Available: "), ("all", None)],
    ),
)
def test_ranks_choose_the_same_or_all_end_with_one_message(
    rank_1: str, begins: str | None, tmp_path: Path, wan1: Path
) -> None:
    auto = {"teacher_deepspeed_config": "ds_configs/teacher/auto.json"}
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), **auto)
    first, second = call(chosen_on_two, given, rank_1, ranks=2)
    assert first == second
    problems, chosen = first
    assert len(problems) == (begins is not None) and len(chosen) == 2 * (begins is None)
    assert all(problem.startswith(begins) for problem in problems)
