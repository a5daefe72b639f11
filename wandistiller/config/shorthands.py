"""Short flags of older command lines; each is replaced by the setting that it stands for."""

from dataclasses import fields
from typing import Any

from wandistiller.config.run_config import RunConfig, read_run_config
from wandistiller.config.validate import collecting
from wandistiller.engine import ds_config
from wandistiller.engine.ds_overrides import EngineOverrides, contradictions
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.files import read_json


def read_run(recipe: str | None, flags: dict[str, Any]) -> RunConfig:
    """Read a recipe's file and merge the flags; see `merged`."""
    return merged(read_json(recipe) if recipe else {}, flags, recipe)


def merged(values: dict[str, Any], flags: dict[str, Any], recipe: str | None) -> RunConfig:
    """Replace shorthands by their settings, then call `read_run_config`; flags win over the recipe.

    Args:
        values: the recipe's.
        recipe: its name, if there is one.

    Raises:
        ConfigError: with all problems, among them shorthands that contradict a JSON.
    """
    values, flags = dict(values), dict(flags)
    if "teacher_deepspeed_config" in flags:  # it replaces the precision of the recipe's too
        values.pop("teacher_dtype", None)
    problems = _expand(recipe or "recipe", values) + _expand("command line", flags)
    with collecting(problems):
        run = read_run_config(values, flags, recipe or "command line")
    if problems:
        raise ConfigError(*problems)
    return run


def _expand(where: str, given: dict[str, Any]) -> list[str]:
    """Replace shorthands in `given`; return the problems of those that contradict another setting there."""
    key, problems = "teacher_device_strategy", _student_problems(where, given)
    if (steps := given.pop("num_steps", None)) is not None and given.setdefault("max_steps", steps) != steps:
        remedy = f"`max_steps` is {given['max_steps']} and means the same. Keep one."
        problems.append(problem(where, "num_steps", steps, remedy))
    if type(given.get("teacher_on_cpu")) is bool and given.pop("teacher_on_cpu"):
        if given.setdefault(key, "cpu") != "cpu":
            remedy = "`teacher_on_cpu` is given too and means `cpu`. Keep one."
            problems.append(problem(where, key, given[key], remedy))
    named, strategy = given.get("teacher_deepspeed_config"), given.get(key)
    if isinstance(strategy, str) and strategy in strategies():
        del given[key]
        file = f"ds_configs/teacher/{strategies()[strategy]}.json"
        if named not in (None, file):
            problems.append(
                f"{where}: `{key}` is {strategy}, which means {file}, but `teacher_deepspeed_config` "
                f"is {named}. Keep one."
            )
        given["teacher_deepspeed_config"] = file
    return problems + (_dtype_problems(where, named, given.get("teacher_dtype")) if named else [])


def _dtype_problems(where: str, named: str | dict[str, Any], dtype: Any) -> list[str]:
    """List the problem of a `teacher_dtype` that contradicts the teacher's JSON."""
    try:
        file, ds = ds_config.load(named)
    except (ConfigError, TypeError):
        return []  # reported when the JSON is read
    its_dtype = ds_config.dtype_name(ds) if {"bf16", "fp16"} & ds.keys() else dtype
    if dtype is None or dtype == its_dtype:
        return []
    return [
        f"{where}: `teacher_dtype` is {dtype}, but `teacher_deepspeed_config` names {file}, where the "
        f"precision is {its_dtype}. Keep one."
    ]


def _student_problems(where: str, given: dict[str, Any]) -> list[str]:
    """List the flags of the student's engine that contradict its JSON."""
    if not (named := given.get("deepspeed_config")):
        return []
    try:
        file, ds = ds_config.load(named)
        overrides = {f.name: given[f.name] for f in fields(EngineOverrides) if f.name in given}
        contradicted = contradictions(ds, EngineOverrides(**overrides))
    except (ConfigError, TypeError, AttributeError, KeyError, StopIteration):
        return []  # reported when the JSON is read
    return [
        f"{where}: `{flag}` is {value}, but `deepspeed_config` names {file}, where `{key}` is {other}. "
        "Keep one."
        for flag, value, key, other in contradicted
    ]
