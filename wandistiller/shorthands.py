"""Short flags for people who come with older command lines; each becomes the setting that it stands for."""

from dataclasses import fields
from typing import Any

from wandistiller import deepspeed_json
from wandistiller.config import STRATEGIES, RunConfig, read_json, read_run_config
from wandistiller.problems import ConfigError, problem
from wandistiller.student_json import Asked, contradictions

TEACHER_JSON = "ds_configs/teacher/{}.json"


def read_run(recipe: str | None, flags: dict[str, Any]) -> RunConfig:
    """The run of a recipe's file and the flags beside it; as `merged`."""
    return merged(read_json(recipe) if recipe else {}, flags, recipe)


def merged(values: dict[str, Any], flags: dict[str, Any], recipe: str | None) -> RunConfig:
    """`read_run_config` once the shorthands are written out; what a flag stands for wins over the recipe, as flags do.

    Args:
        values: the recipe's.
        recipe: its name, if there is one.
    Raises:
        ConfigError: with all problems, among them a shorthand beside a JSON that says something else.
    """
    values, flags = dict(values), dict(flags)
    if "teacher_deepspeed_config" in flags:  # and with it its precision
        values.pop("teacher_dtype", None)
    found = _write_out(recipe or "recipe", values) + _write_out("command line", flags)
    try:
        run = read_run_config(values, flags, recipe or "command line")
    except ConfigError as error:
        raise ConfigError(*found, *error.problems) from None
    if found:
        raise ConfigError(*found)
    return run


def _write_out(where: str, given: dict[str, Any]) -> list[str]:
    """Replace short settings by those that they stand for; returns what contradicts them in the same place."""
    key, found = "teacher_device_strategy", _student_problems(where, given)
    if (steps := given.pop("num_steps", None)) is not None and given.setdefault("max_steps", steps) != steps:
        found.append(problem(where, "num_steps", steps, f"`max_steps` is {given['max_steps']} and means the same. Keep one."))
    if type(given.get("teacher_on_cpu")) is bool and given.pop("teacher_on_cpu"):
        if given.setdefault(key, "cpu") != "cpu":
            found.append(problem(where, key, given[key], "`teacher_on_cpu` is given too and means `cpu`. Keep one."))
    named, strategy = given.get("teacher_deepspeed_config"), given.get(key)
    if isinstance(strategy, str) and strategy in STRATEGIES:
        del given[key]
        meant = TEACHER_JSON.format(STRATEGIES[strategy])
        if named not in (None, meant):
            found.append(f"{where}: `{key}` is {strategy}, which means {meant}, but `teacher_deepspeed_config` is {named}. "
                         "Keep one.")  # fmt: skip
        given["teacher_deepspeed_config"] = meant
    return found + (_dtype_problems(where, named, given.get("teacher_dtype")) if named else [])


def _dtype_problems(where: str, named: str | dict[str, Any], dtype: Any) -> list[str]:
    """A precision beside a JSON that asks for another one."""
    try:
        file, ds = deepspeed_json.load(named)
    except (ConfigError, TypeError):
        return []  # said when the JSON is read
    says = deepspeed_json.dtype_name(ds) if {"bf16", "fp16"} & ds.keys() else dtype
    if dtype is None or dtype == says:
        return []
    return [f"{where}: `teacher_dtype` is {dtype}, but `teacher_deepspeed_config` names {file}, which asks for {says}. "
            "Keep one."]  # fmt: skip


def _student_problems(where: str, given: dict[str, Any]) -> list[str]:
    """Short settings of the student's engine beside a JSON that says otherwise."""
    if not (named := given.get("deepspeed_config")):
        return []
    try:
        file, ds = deepspeed_json.load(named)
        found = contradictions(ds, Asked(**{f.name: given[f.name] for f in fields(Asked) if f.name in given}))
    except (ConfigError, TypeError, AttributeError, KeyError, StopIteration):
        return []  # said when the JSON is read
    return [f"{where}: `{flag}` is {value}, but `deepspeed_config` names {file}, where `{key}` is {says}. Keep one."
            for flag, value, key, says in found]  # fmt: skip
