"""A recipe and flags become one run: older names, short names of JSONs, and what the user left open."""

import os
from typing import Any

from wandistiller.config.aliases import TEACHER, teacher_file, without_aliases
from wandistiller.config.run_config import AUTO, ZERO, RunConfig, read_run_config
from wandistiller.config.validate import collecting
from wandistiller.data.lines import prompt_problems
from wandistiller.engine.ds_config import key_problems, load
from wandistiller.engine.ds_overrides import fill_auto
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError

WHOLE_TEACHER = {"experts": "all"}
"""The student of a run of adapters that names none."""


def merged(
    values: dict[str, Any],
    flags: dict[str, Any],
    recipe: str | None,
    emulated: bool | None = None,
) -> RunConfig:
    """Replace older settings, and read the run; flags win over the recipe.

    Args:
        emulated: whether the CPU that computes emulates bf16; None leaves every precision as it is.

    Raises:
        ConfigError: with all problems.
    """
    where = recipe or "recipe"
    values, problems = without_aliases(where, values)
    flags, more = without_aliases("command line", flags)
    problems += more
    named = (values | flags).get(TEACHER)
    if isinstance(named, str) and named in strategies():
        place, named = flags if TEACHER in flags else values, None  # its precision is left open
        place[TEACHER] = teacher_file(place[TEACHER])
    elif TEACHER in flags:  # it replaces the precision of the recipe's too
        values.pop("teacher_dtype", None)
    own = values.get("deepspeed_config", AUTO)
    if flags.get("deepspeed_config") == AUTO != own and isinstance(own, str | dict):
        with collecting(problems):  # its batch, optimizer and schedule stay
            json = load(own)
            problems += key_problems(fill_auto(json, 1))
            flags["deepspeed_config"] = json.replaced(**{ZERO: AUTO}).raw
    origin = dict.fromkeys(values, where) | dict.fromkeys(flags, "command line")
    if emulated is not None:
        values |= _open_precisions(values | flags, named, emulated)
    given = values | flags
    if given.get("lora") is not None and "student_config" not in given:
        values["student_config"] = WHOLE_TEACHER
    problems += _prompt_problems(origin, given)
    with collecting(problems):
        run = read_run_config(values, flags, recipe or "command line")
    if problems:
        raise ConfigError(*problems)
    return run


def _open_precisions(given: dict[str, Any], named: Any, emulated: bool) -> dict[str, str]:
    """Return float32 for each engine whose precision the user left open, on a CPU that emulates bf16.

    A run that has begun keeps its precision, wherever it goes on.

    Args:
        named: the teacher's JSON, where the user named one.
    """
    left = {}
    if given.get("deepspeed_config") in (None, AUTO) and given.get("mixed_precision") is None:
        left["student_deepspeed"] = {"mixed_precision": "no"}
    if named in (None, AUTO) and given.get("teacher_dtype") is None:
        left["teacher_deepspeed"] = {"teacher_dtype": "float32"}
    found: dict[str, str] = {}
    for name, setting in left.items():
        begun = f"{given.get('output_dir')}/resolved/{name}.json"
        is_float32 = emulated
        # not Path.is_file, which raises OSError of a long name (Python 3.11)
        if given.get("resume") != "never" and os.path.isfile(begun):
            is_float32 = load(begun).precision == "float32"
        found |= setting if is_float32 else {}
    return found


def _prompt_problems(origin: dict[str, str], given: dict[str, Any]) -> list[str]:
    """List the prompts of the settings in which there is nothing to see."""
    problems: list[str] = []
    if isinstance(negative := given.get("negative_prompt"), str):
        problems += prompt_problems(origin["negative_prompt"], "negative_prompt", [negative], none=True)
    if isinstance(drawn := given.get("sample_prompts"), list):
        texts = [prompt for prompt in drawn if isinstance(prompt, str)]
        problems += prompt_problems(origin["sample_prompts"], "sample_prompts", texts)
    return problems
