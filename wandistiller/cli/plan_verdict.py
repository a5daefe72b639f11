"""The end of `plan`: whether every stage fits, the flags with which it does, and the recipe that does."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from wandistiller.config.job import Job
from wandistiller.config.recipe import in_stages, recipe_of
from wandistiller.config.run_config import JSON_FILES, ONLY_FLAGS, RunConfig
from wandistiller.config.stages import read_jobs
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import shipped_json
from wandistiller.engine.ds_overrides import TOTAL, EngineOverrides
from wandistiller.planner.disk import on_its_disk
from wandistiller.planner.machine import Demand, Machine
from wandistiller.planner.resolve_auto import HELPS, Choice, choices
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json, write_json

LORAS = {
    (False, False): "1x16_wan2.1_14b_lora",
    (False, True): "1x16_wan2.1_14b_lora",
    (True, False): "1x16_wan2.2_a14b_lora",
    (True, True): "1x24_wan2.2_i2v_a14b_lora",
}
"""Whether the teacher has two experts, whether it is given frames -> a recipe in ds_configs/machines/."""
SAMPLES = 4
"""Samples of a step of those recipes, at least."""
AUTO = "--deepspeed_config auto"


class Planned(NamedTuple):
    """A stage of the recipe, or the run, on a machine."""

    job: Job
    machine: Machine
    """With what its disk has room for."""
    short: list[Demand]
    """What does not fit."""
    fits: list[Choice]
    """The simplest pair of shipped JSONs that fits, for each teacher JSON."""


class Recommended(NamedTuple):
    """A recipe whose stages fit, by their name."""

    runs: dict[str, RunConfig]
    best: dict[str, Choice]
    values: dict[str, Any]
    """As the user wrote them."""

    def write(self, file: Path, machine: Machine) -> list[str]:
        """Write it on rank 0, and return the lines that say so and how to train with it."""
        values = {"output_dir": f"runs/{file.stem}"} | self.values
        recipes = {s: _without_engines(run, values) | self.best[s].settings for s, run in self.runs.items()}
        if collectives.rank() == 0:
            write_json(file, recipes[""] if "" in recipes else in_stages(recipes, values))
        return [f"wrote {file}", f"next: {next_command(file, machine)}"]


def verdict(planned: list[Planned], adapters: Recommended | None) -> list[str]:
    """Say whether every stage fits, and if not, what does."""
    names = [stage.job.stage for stage in planned if stage.short]
    if not names and not all(stage.job.teacher.memory_known for stage in planned):
        return ["verdict: whether it fits is not known"]
    if not names:
        fits = f"all {len(planned)} stages fit" if len(planned) > 1 else "it fits"
        engines = [stage.job.student_engine for stage in planned]
        on_gpus = {engine.optimizer_on == "none" for engine in engines if engine.is_offload_open}
        words = [", optimizers in CPU memory", ", optimizers on the GPUs"]
        return [f"verdict: {fits}{words[on_gpus.pop()] if len(on_gpus) == 1 else ''}"]
    lines = [f"verdict: it does NOT fit{': stage ' * bool(names[0])}{', '.join(names)}"]
    if fitting := _fitting_flags(planned):
        return [*lines, "it fits with", f"  {fitting}"]
    if adapters:
        named = "; ".join(f"{stage} {choice}".strip() for stage, choice in adapters.best.items())
        return [
            *lines,
            "no shipped JSONs hold this student here, but a LoRA of the whole teacher, for 4 steps, fits:",
            f"  {named}",
            "--recommend FILE writes its recipe",
        ]
    return [*lines, f"no shipped JSONs hold it here. {HELPS}"]


def _fitting_flags(planned: list[Planned]) -> str | None:
    """Return flags with which every stage fits: the student's engine alone, if that is enough."""
    known = all(stage.job.teacher.memory_known for stage in planned)
    if known and all(next(choices(stage.job, stage.machine, (True, False)), None) for stage in planned):
        return AUTO
    first, *others = ([choice.teacher for choice in stage.fits] for stage in planned)
    common = next((name for name in first if all(name in names for names in others)), None)
    return f"{AUTO} --teacher_deepspeed_config {common}" if common else None


def adapters_of(values: dict[str, Any], job: Job, machine: Machine) -> Recommended | None:
    """Return the recipe of a LoRA of the run's teacher for 4 steps, of two experts in two stages, if it fits.

    Teacher, data and size are those of `values`, all else that of a shipped recipe. None too where that does
    not suit the teacher.
    """
    two = len(job.folder.configs) == 2
    if job.run.lora is not None and (not two or job.stage):
        return None
    shipped = read_json(f"ds_configs/machines/{LORAS[two, job.folder.config.takes_image]}.json")
    samples = machine.ranks * -(-SAMPLES // machine.ranks)
    shipped["deepspeed_config"] = shipped_json(shipped["deepspeed_config"]).replaced(**{TOTAL: samples}).raw
    keys = {f.name for f in fields(RunConfig) if f.metadata["group"] in ("paths", "size")} - JSON_FILES.keys()
    others = {k: v for k, v in shipped.items() if k not in keys | {"batch_size"}}
    values = others | {k: v for k, v in values.items() if k in keys}
    try:
        recipe = recipe_of(values, {"resume": "never"})
        stages = read_jobs(recipe, machine.ranks, here=False)
    except ConfigError:
        return None
    best: dict[str, Choice] = {}
    for stage in stages:
        if not (choice := next(choices(stage, on_its_disk(machine, stage, None)), None)):
            return None
        best[stage.stage] = choice
    return Recommended(recipe.runs, best, values)


def next_command(file: str | Path, machine: Machine) -> str:
    """Return the command that trains with a recipe on a machine."""
    train = f"wandistiller train --recipe {shlex.quote(str(file))}"
    if machine.ranks == 1 and machine.device_free is None:
        return train
    if machine.ranks > machine.ranks_on_node:
        return f"HOSTFILE=launch/hostfile bash launch/deepspeed.sh{train.removeprefix('wandistiller')}"
    return f"deepspeed --num_gpus {machine.ranks} --module {train}"


def _without_engines(config: RunConfig, values: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `config`, shorthands written out, without the settings that the engines' JSONs hold."""
    defaults = asdict(RunConfig())
    in_jsons = {"teacher_dtype", *ONLY_FLAGS, *(f.name for f in fields(EngineOverrides))}
    recipe = asdict(config)
    recipe |= {key: values.get(key, defaults[key]) for key in ("output_dir", "cache_dir", "resume")}
    return {k: value for k, value in recipe.items() if value != defaults[k] and k not in in_jsons}
