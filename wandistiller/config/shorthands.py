"""One rule for settings that are given twice, and short flags of older command lines.

A flag replaces the recipe's setting for the same thing; neither replaces a value that a named DeepSpeed JSON
fixes: two that differ are an error that names both.
"""

from dataclasses import fields
from typing import Any

from wandistiller.config.run_config import RunConfig, read_run_config
from wandistiller.config.validate import collecting
from wandistiller.engine import ds_config
from wandistiller.engine.ds_overrides import EngineOverrides, contradictions
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import read_json

FLAGS = "command line"
STRATEGY, TEACHER_JSON = "teacher_device_strategy", "teacher_deepspeed_config"
ONE_THING = [
    {"max_steps", "num_steps", "num_epochs"},
    {"sample_every", "sample_interval"},
    {STRATEGY, TEACHER_JSON, "teacher_on_cpu"},
]
"""Settings with several names."""


def read_run(recipe: str | None, flags: dict[str, Any]) -> RunConfig:
    """Read a recipe's file and merge the flags; see `merged`."""
    return merged(read_json(recipe) if recipe else {}, flags, recipe)


def merged(values: dict[str, Any], flags: dict[str, Any], recipe: str | None) -> RunConfig:
    """Replace shorthands by their settings, let flags replace the recipe's, then call `read_run_config`.

    Args:
        values: the recipe's.
        recipe: its name, if there is one.

    Raises:
        ConfigError: with all problems, among them two settings that cannot both hold.
    """
    values, flags, where = dict(values), dict(flags), recipe or "recipe"
    for names in ONE_THING:
        if names & flags.keys():
            values = {key: value for key, value in values.items() if key in flags or key not in names}
    if TEACHER_JSON in flags:  # it replaces the precision of the recipe's too
        values.pop("teacher_dtype", None)
    given, origin = values | flags, dict.fromkeys(values, where) | dict.fromkeys(flags, FLAGS)
    problems = _student_problems(given, origin) + _dtype_problems(given, origin) + _unneeded(given, origin)
    problems += _expand(where, values) + _expand(FLAGS, flags)
    with collecting(problems):
        run = read_run_config(values, flags, recipe or FLAGS)
    if problems:
        raise ConfigError(*problems)
    return run


def _expand(where: str, given: dict[str, Any]) -> list[str]:
    """Replace shorthands in `given`; return the problems of those that contradict another setting there."""
    problems = []
    if (steps := given.pop("num_steps", None)) is not None and given.setdefault("max_steps", steps) != steps:
        remedy = f"`max_steps` is {given['max_steps']} and means the same. Keep one."
        problems.append(problem(where, "num_steps", steps, remedy))
    if "sample_every" in given and given.get("sample_interval") is not None:
        problems.append(f"{where}: `sample_every` and `sample_interval` are both given. Keep one.")
    name = STRATEGY
    if type(given.get("teacher_on_cpu")) is bool and given.pop("teacher_on_cpu"):
        name = name if STRATEGY in given else "teacher_on_cpu"
        if given.setdefault(STRATEGY, "cpu") != "cpu":
            remedy = "`teacher_on_cpu` is given too and means `cpu`. Keep one."
            problems.append(problem(where, STRATEGY, given[STRATEGY], remedy))
    named, strategy = given.get(TEACHER_JSON), given.get(STRATEGY)
    if isinstance(strategy, str) and strategy in strategies():
        del given[STRATEGY]
        file = f"ds_configs/teacher/{strategies()[strategy]}.json"
        if named not in (None, file):
            problems.append(
                f"{where}: `{name}` is {strategy if name == STRATEGY else 'true'}, which means {file}, but "
                f"`{TEACHER_JSON}` is {named}. Keep one."
            )
        given[TEACHER_JSON] = file
    return problems


def _unneeded(given: dict[str, Any], origin: dict[str, str]) -> list[str]:
    """List the problem of a limit of skipped steps where none is skipped."""
    key, default = "nonfinite_limit", RunConfig().nonfinite_limit
    if given.get(key, default) == default or given.get("on_nonfinite", "stop") != "stop":
        return []
    return [problem(origin[key], key, given[key], 'It needs `on_nonfinite`: "skip". Give both, or none.')]


def _dtype_problems(given: dict[str, Any], origin: dict[str, str]) -> list[str]:
    """List the problem of a `teacher_dtype` that contradicts a teacher's JSON that the user names.

    A strategy names none: its precision may be changed.
    """
    dtype = given.get("teacher_dtype")
    try:
        file, ds = ds_config.load(given[TEACHER_JSON])
        its_dtype = ds_config.dtype_name(ds) if {"bf16", "fp16"} & ds.keys() else dtype
    except (ConfigError, TypeError, AttributeError, KeyError):
        return []  # reported when the JSON is read
    if dtype is None or dtype == its_dtype:
        return []
    return [
        f"{origin['teacher_dtype']}: `teacher_dtype` is {dtype}, but `{TEACHER_JSON}` names {file}, where "
        f"the precision is {its_dtype}. Keep one."
    ]


def _student_problems(given: dict[str, Any], origin: dict[str, str]) -> list[str]:
    """List the settings of the student's engine that contradict a JSON that the user names."""
    if not (named := given.get("deepspeed_config")):
        return []
    try:
        file, ds = ds_config.load(named)
        overrides = {f.name: given[f.name] for f in fields(EngineOverrides) if f.name in given}
        contradicted = contradictions(ds, EngineOverrides(**overrides))
    except (ConfigError, TypeError, AttributeError, KeyError, StopIteration):
        return []  # reported when the JSON is read
    return [
        f"{origin[flag]}: `{flag}` is {value}, but `deepspeed_config` names {file}, where `{key}` is "
        f"{other}. Keep one."
        for flag, value, key, other in contradicted
    ]
