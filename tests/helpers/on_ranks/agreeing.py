"""Ranks with other settings or nodes, for test_identity.py and test_resolve_auto_ranks.py."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from trainers import job_of

from wandistiller.config.identity import require_same
from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.planner import resolve_auto
from wandistiller.utils.errors import ConfigError


def compared(values: dict[str, Any], on_rank_1: list[dict[str, Any]]) -> list[list[str]]:
    """Return the messages where rank 1 has these changes, of the recipe or of what was found of the run."""
    problems = []
    for changes in on_rank_1:
        changes = changes if collectives.rank() == 1 else {}
        of_job = {key: changes[key] for key in changes.keys() & {"is_spent", "resume_from"}}
        settings = {key: value for key, value in changes.items() if key not in of_job}
        problems.append(_problems(dataclasses.replace(job_of(values | settings), **of_job)))
    return problems


def _problems(job: Job) -> list[str]:
    try:
        require_same([job])
    except ConfigError as error:
        return error.problems
    return []


def chosen_on_two(values: dict[str, Any], rank_1: str) -> tuple[list[str], list[str]]:
    """Return the messages where two stages are `auto`, and the student JSONs if there are none.

    Args:
        rank_1: what its node can do: all, build nothing that rank 0 chooses, or no JSON at all.
    """
    job, choices = job_of(values), resolve_auto.choices

    def fewer(*args: Any, **kwargs: Any) -> Iterator[resolve_auto.Choice]:
        choice_of_rank = choices(*args, **kwargs)
        if collectives.rank() == 1 and rank_1 != "all":
            next(choice_of_rank)
            choice_of_rank = iter(()) if rank_1 == "nothing" else choice_of_rank
        return choice_of_rank

    with patch.object(resolve_auto, "choices", fewer):
        try:
            return [], [stage.student_engine.where for stage in resolve_auto.decide_auto([job, job])]
        except ConfigError as error:
            return error.problems, []
