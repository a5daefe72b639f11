"""The recipes in ds_configs/machines/ are what the planner chooses for those machines, and their table is its arithmetic."""

from functools import cache
from pathlib import Path

import pytest
from machines import FOLDER, MACHINES, TEACHERS, best, recipe, row
from ranks import ROOT

from wandistiller.config import read_json
from wandistiller.recommend import Choice

PAIRS = [(name, teacher) for name in MACHINES for teacher in TEACHERS]
TABLE = (ROOT / "ds_configs" / "README.md").read_text().splitlines()


@cache
def found(published: Path, name: str, teacher: str) -> tuple[Choice, bool]:
    return best(published, teacher, MACHINES[name])


@pytest.mark.parametrize(("name", "teacher"), PAIRS)
def test_the_shipped_recipe_is_the_fastest_that_fits(published: Path, name: str, teacher: str) -> None:
    choice, fits = found(published, name, teacher)
    file = FOLDER / f"{name}_{teacher}.json"
    assert file.is_file() == fits
    assert not fits or read_json(file) == recipe(name, teacher, choice)
    assert row(name, teacher, choice, fits) in TABLE


def test_no_recipe_is_for_a_machine_that_is_not_planned_for() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} <= {f"{name}_{teacher}" for name, teacher in PAIRS}


@pytest.mark.parametrize("teacher", TEACHERS)
def test_more_or_larger_gpus_are_never_slower(published: Path, teacher: str) -> None:
    for machines in (("1x24", "2x24", "4x24"), ("1x48", "2x48"), ("1x80", "4x80", "8x80", "2x8x80"), ("1x24", "1x48", "1x80")):
        seconds = [found(published, name, teacher)[0].seconds for name in machines]
        assert seconds == sorted(seconds, reverse=True)
