"""Reads the run of a recipe without stages, as `train` does."""

from typing import Any

from wandistiller.config.recipe import read_recipe, recipe_of
from wandistiller.config.run_config import RunConfig


def read_run(recipe: str | None, flags: dict[str, Any]) -> RunConfig:
    """Merge the flags into a recipe's file."""
    return read_recipe(recipe, flags).runs[""]


def run_of(values: dict[str, Any], flags: dict[str, Any] | None = None) -> RunConfig:
    """Merge the flags into a recipe's values."""
    return recipe_of(values, flags or {}).runs[""]
