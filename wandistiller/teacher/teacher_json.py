"""The teacher's DeepSpeed JSON: its checks, and the placement that its block "wandistiller" names."""

import copy
from functools import cache
from typing import Any, Literal

from wandistiller.engine.ds_config import complete, key_problems, offload_problems
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK, section_of
from wandistiller.teacher.placements.base import Placement
from wandistiller.teacher.strategies import SHORT_NAME
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.registry import classes_in
from wandistiller.utils.validation import Text, check, types_of

TEACHER_REFUSES = {
    # deepspeed 0.19.8 makes its groups once in a process and stops at the second expert's, or at initialize
    "zero_hpz_partition_size": "A frozen teacher needs no second part: remove it, and write "
    '"wandistiller": {"shards": "node"}, which keeps all its weights within a node.',
    "zero_quantized_weights": "It would change the teacher's outputs; remove it.",
    "zero_quantized_nontrainable_weights": "It would change the teacher's outputs; remove it.",
    "legacy_stage1": "DeepSpeed has removed it; remove it.",
    "zenflow": "A frozen teacher has no optimizer; remove it.",
}
AUTO = "auto"
"""The placement that `planner.resolve_auto` replaces by another."""


@cache
def placements() -> dict[str, type[Placement]]:
    """The placements by name."""
    return classes_in("wandistiller.teacher.placements", Placement)


def read_placement(ds: dict[str, Any]) -> Placement:
    """Read the placement of a checked teacher JSON."""
    settings = dict(ds.get(BLOCK, {}))
    return placements()[settings.pop("placement", "engine")](**settings)


def quantized_facts(ds: dict[str, Any]) -> dict[str, str]:
    """Return the format of quantised weights as a fact of a run; empty, as in earlier runs, without any."""
    weights = read_placement(ds).weights
    return {"teacher_weights": weights} if weights else {}


def teacher_engine(where: str, ds: dict[str, Any], world: int = 1) -> dict[str, Any]:
    """Check the teacher's JSON and complete it with what an engine without an optimizer needs.

    Raises:
        ConfigError: with all problems at once.
    """
    unwanted = [key for key in ("optimizer", "scheduler") if key in ds]
    text = "A frozen teacher takes none; remove this section."
    problems = [problem(where, key, ds[key], text) for key in unwanted]
    problems += key_problems(where, {k: v for k, v in ds.items() if k not in (*unwanted, BLOCK)})
    problems += _block_problems(where, ds, world)
    zero = section_of(ds, "zero_optimization")
    if zero.get("stage") in (1, 2) and zero["stage"] is not True:
        text = "A frozen teacher has no optimizer; use 0 (replicated) or 3 (sharded)."
        problems.append(problem(where, "zero_optimization.stage", zero["stage"], text))
    for key, remedy in TEACHER_REFUSES.items():
        if zero.get(key, 0) is True or zero.get(key, 0) not in (0, 1):
            problems.append(problem(where, f"zero_optimization.{key}", zero[key], remedy))
    problems += offload_problems(where, ds)
    if problems:
        raise ConfigError(*problems)
    ds = {k: v for k, v in copy.deepcopy(ds).items() if k not in BATCH_KEYS}
    ds["train_micro_batch_size_per_gpu"] = 1  # without an optimizer it means nothing, but DeepSpeed wants one
    if ds.get(BLOCK, {}).pop(SHORT_NAME, None) and not ds[BLOCK]:
        del ds[BLOCK]
    complete(ds)
    return ds


def _block_problems(where: str, ds: dict[str, Any], world: int) -> list[str]:
    """Problems of the block, and of the JSON around it."""
    own = {name: types_of(placement) for name, placement in placements().items()}
    types: dict[str, Any] = {"placement": Literal[tuple(own)], SHORT_NAME: Text}
    for settings in own.values():
        types |= settings
    problems, block = check(where, given := ds.get(BLOCK, {}), types, f"{BLOCK}.")
    if isinstance(given, dict) and "placement" in given and "placement" not in block:
        return problems  # the meaning of the other keys depends on it
    name, _ = block.pop("placement", "engine"), block.pop(SHORT_NAME, None)
    for key in sorted(block.keys() - own[name].keys()):
        text = f"It means nothing for the placement {name}; remove it."
        problems.append(problem(where, f"{BLOCK}.{key}", block.pop(key), text))
    placement = placements()[name](**block)
    if placement.ahead and not placement.can_work_ahead(ds):
        text = "Only the placements streamed and files, and an engine of stage 0, predict ahead; remove it."
        problems.append(problem(where, f"{BLOCK}.ahead", True, text))
    return problems + placement.problems(where, ds, world) + placement.weights_problems(where, ds)
