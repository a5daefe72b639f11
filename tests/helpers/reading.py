"""Reads the run of a recipe without stages, as `train` does."""

from typing import Any

from wandistiller.config.run_config import RunConfig
from wandistiller.config.stages import read_runs


def read_run(recipe: str | None, flags: dict[str, Any]) -> RunConfig:
    """Merge the flags into a recipe's file."""
    (run,) = read_runs(recipe, flags).values()
    return run
