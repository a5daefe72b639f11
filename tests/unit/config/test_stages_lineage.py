"""Teacher blocks that a student's are compared with, over all runs from the first one's choice of layers."""

from pathlib import Path

import pytest
from recipes import recipe

from wandistiller.checkpoint.facts import Facts
from wandistiller.config.identity import provenance
from wandistiller.config.job import Job
from wandistiller.config.recipe import recipe_of
from wandistiller.config.stages import read_jobs
from wandistiller.student.config import Layers

FEATURE = {"objective": "feature"}


def jobs(folder: Path, wan: Path, keep: Layers) -> list[Job]:
    student = {"keep_layers": keep} | ({} if isinstance(keep, list) else {"num_layers": 3})
    given = recipe(folder, wan, output_dir=str(folder / "out"), student_config=student)
    given["stages"] = [{"name": "match"}, {"name": "more"} | FEATURE, {"name": "last"} | FEATURE]
    return read_jobs(recipe_of(given, {}, "r.json"), 1, here=False)


@pytest.mark.parametrize(
    ("keep", "blocks"), [("uniform", [1, 2, 3]), ("ends", [0, 2, 3]), ([0, 1, 2], [0, 1, 3])]
)
def test_later_stages_match_the_blocks_that_the_first_one_s_layers_stand_for(
    keep: Layers, blocks: list[int], tmp_path: Path, wan1: Path
) -> None:
    for job in jobs(tmp_path, wan1, keep)[1:]:
        (term,) = job.objective.for_student(job.stands_for).terms
        assert term.matched_blocks == [*zip(range(3), blocks, strict=True)]


def test_layers_chosen_by_importance_are_in_the_facts_once_they_are_known(tmp_path: Path, wan1: Path) -> None:
    first = jobs(tmp_path, wan1, "importance")[0]
    assert provenance(first).stands_for is None
    assert Facts.of(provenance(first.with_layers([0, 1, 2])).as_json()).stands_for == [0, 1, 3]
