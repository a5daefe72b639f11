"""A recipe and the flags become its runs; each setting keeps its place, and no other file is opened."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from wandistiller.config.run_config import AUTO, EITHER, ONLY_FLAGS, PATHS, AutoOf, RunConfig
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.errors import ConfigError, Problem, impossible_values, problem
from wandistiller.utils.files import read_json
from wandistiller.utils.validation import check, types_of

STAGES, NAME = "stages", "name"
STUDENT, ENGINE, TEACHER = "student_config", "deepspeed_config", "teacher_deepspeed_config"
FOLDERS = ("output_dir", "cache_dir", "sample_dir")
OF_ALL = (*FOLDERS, "resume", "log_level", "timeout")
"""Settings that hold for the whole recipe."""
COMMAND_LINE = "command line"
FITTING_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}")


class Setting(NamedTuple):
    """A value that the user gave."""

    value: Any
    origin: str
    """The recipe's file, or COMMAND_LINE."""


Settings = dict[str, Setting]


class Recipe(NamedTuple):
    """The runs of a recipe by stage, in order; without stages one, of the stage ""."""

    runs: dict[str, RunConfig]
    origins: dict[str, dict[str, str]]
    """Of each run, the origin of every setting that the user gave."""
    where: str
    """The recipe's file, or COMMAND_LINE: the origin of all other settings."""


def read_recipe(file: str | None, flags: dict[str, Any]) -> Recipe:
    """Read a recipe's file, if one is given, and merge the flags; see `recipe_of`."""
    return recipe_of(read_json(file) if file else {}, flags, file)


def recipe_of(values: dict[str, Any], flags: dict[str, Any], file: str | None = None) -> Recipe:
    """Return the runs of a recipe's values: a stage's own replace the others, and flags win over both.

    A stage writes to OUTPUT/1_NAME, and all use one cache.

    Raises:
        ConfigError: with all problems of the recipe, its stages and the flags.
    """
    where, stages = file or COMMAND_LINE, values.get(STAGES, [{NAME: ""}])
    if problems := _stage_problems(where, stages, values | flags) if STAGES in values else []:
        raise ConfigError(*problems)
    shared = _sound(where, {k: v for k, v in values.items() if k != STAGES}, problems)
    of_flags, of_stages, before = _sound(COMMAND_LINE, flags, problems), {}, ""
    for number, stage in enumerate(stages, 1):
        name, keys = stage[NAME], {k: v for k, v in stage.items() if k != NAME}
        below = _laid_over(shared, _sound(where, keys, problems, name))
        settings = _laid_over(below, of_flags)
        engine = below.get(ENGINE, Setting(AUTO, where))
        if settings.get(ENGINE, engine).value == AUTO != engine.value:
            settings[ENGINE] = engine._replace(value=AutoOf(engine.value))
        if name:
            settings |= _folders(settings, f"{number}_{name}")
        if number > 1:
            settings[STUDENT] = Setting({"init": before}, where)
        elif "lora" in settings and settings["lora"].value is not None:  # adapters, by default of the whole
            settings.setdefault(STUDENT, Setting({"experts": "all"}, where))
        before = settings["output_dir"].value if "output_dir" in settings else ""
        of_stages[name] = settings
    for key in PATHS:
        if not all(key in values.keys() | flags.keys() | stage.keys() for stage in stages):
            problems.append(Problem(f"`{key}` is missing. Give --{key} or the recipe key.", where, key))
    if problems:
        raise ConfigError(*problems)
    runs = {name: RunConfig(**{k: s.value for k, s in of_stages[name].items()}) for name in of_stages}
    origins = {name: {k: s.origin for k, s in settings.items()} for name, settings in of_stages.items()}
    return Recipe(runs, origins, where)


def _sound(origin: str, values: dict[str, Any], problems: list[Problem], stage: str = "") -> Settings:
    """Return the settings of one origin that are right by themselves; add the problems of the others."""
    wrong = impossible_values(origin, values)
    possible = {key: value for key, value in values.items() if not impossible_values("", {key: value})}
    for key in ONLY_FLAGS if origin != COMMAND_LINE else ():
        if key in possible:
            remedy = f"It says how a run is started, not what it is. Give it as a flag, --{key}."
            wrong.append(problem(origin, key, possible.pop(key), remedy))
    mistyped, good = check(origin, possible, types_of(RunConfig))
    for key, other in EITHER:
        if values.get(key) is not None and values.get(other) is not None:
            mistyped.append(Problem(f"`{key}` and `{other}` are both given. Keep one.", origin, key))
    problems += [p.in_stage(stage) if stage else p for p in [*wrong, *mistyped]]
    return {key: Setting(value, origin) for key, value in good.items()}


def _laid_over(below: Settings, above: Settings) -> Settings:
    """Return settings with others in place of those that mean the same."""
    replaced = {key for group in EITHER if above.keys() & {*group} for key in group}
    if TEACHER in above and above[TEACHER].value not in (None, *strategies()):
        replaced.add("teacher_dtype")  # the precision is in that JSON
    return {key: setting for key, setting in below.items() if key not in replaced} | above


def _folders(settings: Settings, name: str) -> Settings:
    """Return folders of a stage's own, and the cache of all stages."""
    named = {key: settings[key] for key in FOLDERS if key in settings and settings[key].value}
    folders = {k: s._replace(value=str(Path(s.value) / name)) for k, s in named.items() if k != "cache_dir"}
    if output := named.get("output_dir"):
        shared = output._replace(value=str(Path(output.value) / "cache"))
        folders["cache_dir"] = named.get("cache_dir", shared)
    return folders


def _stage_problems(where: str, stages: Any, outside: dict[str, Any]) -> list[Problem]:
    """List what is wrong with the list of stages; `outside` has the recipe's other values and the flags."""
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        return [problem(where, STAGES, stages, 'Write a list of objects, each with a "name".')]
    problems, names = [], [stage.get(NAME) for stage in stages]

    def add(number: int, key: str, remedy: str) -> None:
        problems.append(problem(where, f"{STAGES}, {number}: {key}", stages[number - 1].get(key), remedy))

    for number, (name, stage) in enumerate(zip(names, stages, strict=True), 1):
        if not isinstance(name, str) or not FITTING_NAME.fullmatch(name):
            add(number, NAME, "Write a name of letters, digits, - and _, which its folder gets.")
        elif names.index(name) < number - 1:
            add(number, NAME, "Another has it. Write another.")
        for key in (key for key in OF_ALL if key in stage):
            add(number, key, "It holds for all stages. Write it outside of `stages`.")
        if number > 1 and STUDENT in stage:
            remedy = "A stage trains the student of the stage before; only the first one has this key."
            add(number, STUDENT, remedy)
    if (resume := outside.get("resume", "auto")) not in ("auto", "never"):
        remedy = "Stages have checkpoints of their own. Write auto or never."
        problems.append(problem(where, "resume", resume, remedy))
    return problems


def in_stages(runs: dict[str, dict[str, Any]], whole: dict[str, Any]) -> dict[str, Any]:
    """Join the recipes of stages in one: outside stand settings that all have, and the FOLDERS of `whole`."""
    first, *_ = runs.values()
    folders = {key: whole[key] for key in FOLDERS if key in whole}
    shared = {k: v for k, v in first.items() if all(values.get(k) == v for values in runs.values())}
    stages = [
        {NAME: name} | {k: v for k, v in values.items() if k not in {*shared, *OF_ALL}}
        for name, values in runs.items()
    ]
    for stage in stages[1:]:  # the student of the stage before
        stage.pop(STUDENT, None)
    return shared | folders | {STAGES: stages}
