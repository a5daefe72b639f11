"""Settings that say again what a JSON fixes: what contradicts it, and what the user left open."""

import os
from dataclasses import fields, replace
from typing import Any

from wandistiller.config.aliases import TEACHER, teacher_file, without_aliases
from wandistiller.config.run_config import AUTO, ZERO, RunConfig, read_run_config
from wandistiller.config.validate import collecting
from wandistiller.data.lines import prompt_problems
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import key_problems, load
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_overrides import EngineOverrides, contradictions
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.validation import types_of, value_problems

WHOLE_TEACHER = {"experts": "all"}
"""The student of a run of adapters that names none."""


def merged(
    values: dict[str, Any],
    flags: dict[str, Any],
    recipe: str | None,
    world: int | None = None,
    emulated: bool | None = None,
) -> RunConfig:
    """Replace older settings, check those that a JSON fixes too, and read the run; flags win over the recipe.

    Args:
        world: number of ranks; default those of this launch.
        emulated: whether the CPU that computes emulates bf16; None leaves every precision as it is.

    Raises:
        ConfigError: with all problems, among them settings that contradict a JSON, wherever each is given.
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
    engine = (values | flags).get("deepspeed_config")
    own = values.get("deepspeed_config", AUTO)
    if flags.get("deepspeed_config") == AUTO != own and isinstance(own, str | dict):
        with collecting(problems):  # its batch, optimizer and schedule stay
            json, engine = load(own), own
            problems += _own_problems(json)
            flags["deepspeed_config"] = json.replaced(**{ZERO: AUTO}).raw
    origin = dict.fromkeys(values, where) | dict.fromkeys(flags, "command line")
    if emulated is not None:
        values |= _open_precisions(values | flags, named, emulated)
    given = values | flags
    if given.get("lora") is not None and "student_config" not in given:
        values["student_config"] = WHOLE_TEACHER
    problems += _dtype_problems(origin, named, given.get("teacher_dtype")) if named else []
    problems += _prompt_problems(origin, given)
    sharers, ranks = given.get("context_parallel"), collectives.world_size() if world is None else world
    sharers = sharers if isinstance(sharers, int) and sharers > 0 else 1
    problems += _student_problems(origin, given, engine, max(1, ranks // sharers))
    with collecting(problems):
        run = read_run_config(values, flags, recipe or "command line")
    if problems:
        raise ConfigError(*problems)
    return run


def _own_problems(json: DeepSpeedJson) -> list[str]:
    """List the problems of a student's JSON whatever the run decides in place of "auto" in it."""
    decided = key_problems(replace(json, raw=_without_auto(json.raw)))  # what is missing may be "auto"
    return [problem for problem in key_problems(json) if problem in decided]


def _without_auto(section: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the run decides."""
    given = {key: value for key, value in section.items() if value != AUTO}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in given.items()}


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


def _dtype_problems(origin: dict[str, str], named: str | dict[str, Any], dtype: Any) -> list[str]:
    """List the problem of a `teacher_dtype` that contradicts the teacher's JSON."""
    try:
        json = load(named)
    except (ConfigError, TypeError):
        return []  # reported when the JSON is read
    its_dtype = json.precision if {"bf16", "fp16"} & json.raw.keys() else dtype
    if dtype is None or dtype == its_dtype:
        return []
    return [
        f"{origin['teacher_dtype']}: `teacher_dtype` is {dtype}, but `{TEACHER}` names {json.where}, where "
        f"the precision is {its_dtype}. Keep one."
    ]


def _student_problems(
    origin: dict[str, str], given: dict[str, Any], named: str | dict[str, Any] | None, world: int
) -> list[str]:
    """List the settings of the student's engine that contradict the JSON that the user `named`."""
    if not named:
        return []  # the default JSON: its values are defaults
    types = types_of(RunConfig)
    keys = [f.name for f in fields(EngineOverrides) if f.name in given]
    sound = {key: given[key] for key in keys if not value_problems("", {key: given[key]}, types)}
    try:
        json = load(named)
        contradicted = contradictions(json, EngineOverrides(**sound), world)
    except (ConfigError, TypeError):
        return []  # reported when the JSON is read
    names = f"`deepspeed_config` names {json.where}"
    return [
        f"{origin[flag]}: `{flag}` is {value}, but {names}, where {what}. {remedy}"
        for flag, value, what, remedy in contradicted
    ]
