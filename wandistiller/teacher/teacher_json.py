"""The teacher's DeepSpeed JSON: its checks, and the placement that its block "wandistiller" names."""

import copy
from functools import cache
from typing import Any, Literal

from wandistiller.engine.ds_config import INSTEAD, complete, key_problems, offload_problems
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_overrides import fill_auto
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.strategies import SHORT_NAME
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.registry import classes_in
from wandistiller.utils.validation import Text, check

TEACHER_REFUSES = {
    # deepspeed 0.19.8 makes its groups once in a process and stops at the second expert's, or at initialize
    "zero_hpz_partition_size": "A frozen teacher needs no second part: remove it, and write "
    '"wandistiller": {"shards": "node"}, which keeps all its weights within a node.'
} | dict.fromkeys(
    ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "legacy_stage1", "zenflow"), INSTEAD
)
AUTO = "auto"
"""The placement that `planner.resolve_auto` replaces by another."""


@cache
def placements() -> dict[str, type[Placement]]:
    return classes_in("wandistiller.teacher.placements", Placement)


def placed_by(engine: EngineConfig) -> Placement:
    settings = dict(engine.block)
    return placements()[settings.pop("placement", "engine")](engine=engine, **settings)


def with_keys(placement: Placement, **keys: Any) -> Placement:
    engine = placement.engine
    return placed_by(engine.replaced(**{BLOCK: engine.block | keys})) if keys else placement


def quantized_facts(teacher: Placement) -> dict[str, str]:
    """Return the format of quantised weights as a fact of a run; empty, as in earlier runs, without any."""
    return {"teacher_weights": teacher.weights} if teacher.weights else {}


def read_placement(json: DeepSpeedJson, world: int = 1) -> Placement:
    """Check the teacher's JSON, and complete it with what an engine without an optimizer needs.

    Raises:
        ConfigError: with all problems at once.
    """
    json = fill_auto(json, 1)
    unwanted = [key for key in ("optimizer", "scheduler") if key in json.raw]
    text = "A frozen teacher takes none; remove this section."
    problems = [json.problem(key, json.raw[key], text) for key in unwanted]
    problems += key_problems(json.without(*unwanted, BLOCK)) + _block_problems(json, world)
    zero = json.section("zero_optimization")
    if zero.get("stage") in (1, 2) and zero["stage"] is not True:
        text = "A frozen teacher has no optimizer; use 0 (replicated) or 3 (sharded)."
        problems.append(json.problem("zero_optimization.stage", zero["stage"], text))
    for key, remedy in TEACHER_REFUSES.items():
        if zero.get(key, 0) is True or zero.get(key, 0) not in (0, 1):
            problems.append(json.problem(f"zero_optimization.{key}", zero[key], remedy))
    problems += offload_problems(json)
    if problems:
        raise ConfigError(*problems)
    ds = copy.deepcopy(json.without(*BATCH_KEYS).raw)
    ds["train_micro_batch_size_per_gpu"] = 1  # without an optimizer it means nothing, but DeepSpeed wants one
    if ds.get(BLOCK, {}).pop(SHORT_NAME, None) and not ds[BLOCK]:
        del ds[BLOCK]
    complete(ds)
    return placed_by(EngineConfig(json.where, ds, json.overridden, is_compile_open=json.is_compile_open))


def _block_problems(json: DeepSpeedJson, world: int) -> list[str]:
    keys_of = {name: placement.keys() for name, placement in placements().items()}
    types: dict[str, Any] = {"placement": Literal[tuple(keys_of)], SHORT_NAME: Text}
    for settings in keys_of.values():
        types |= settings
    problems, block = check(json.where, written := json.raw.get(BLOCK, {}), types, f"{BLOCK}.")
    if isinstance(written, dict) and "placement" in written and "placement" not in block:
        return problems  # the meaning of the other keys depends on it
    name, _ = block.pop("placement", "engine"), block.pop(SHORT_NAME, None)
    for key in sorted(block.keys() - keys_of[name].keys()):
        text = f"It means nothing for the placement {name}; remove it."
        problems.append(json.problem(f"{BLOCK}.{key}", block.pop(key), text))
    placement = placements()[name](engine=EngineConfig(json.where, json.raw), **block)
    return problems + placement.problems(world) + placement.weights_problems()
