"""Networks that an objective trains beside the student: their shapes and DeepSpeed JSONs."""

from typing import Any, NamedTuple

from wandistiller.engine import ds_config
from wandistiller.engine.ds_config import BatchSize
from wandistiller.engine.ds_overrides import (
    EngineOverrides,
    apply_overrides,
    contradictions,
    fill_auto,
    fill_steps,
)
from wandistiller.engine.ds_schema import BATCH_KEYS, without_block
from wandistiller.engine.kernels import kernel_problems
from wandistiller.engine.preflight import config_problems
from wandistiller.objectives.base import Role
from wandistiller.utils.errors import ConfigError

KEY = "critic_deepspeed_config"


class OtherNetwork(NamedTuple):
    """A network that is trained beside the student."""

    role: Role
    transformer: dict[str, Any]
    """Config of the network."""
    ds: dict[str, Any]
    """Its DeepSpeed JSON."""


def derived(student_ds: dict[str, Any], role: Role) -> dict[str, Any]:
    """Return the student's JSON with the role's learning rate and, in a schedule, number of updates."""
    ds = apply_overrides(student_ds, EngineOverrides(lr=role.lr))
    if (steps := ds.get("scheduler", {}).get("params", {}).get("total_num_steps")) is not None:
        ds["scheduler"]["params"]["total_num_steps"] = steps * role.updates
    return ds


def read_own(
    named: str | dict[str, Any], role: Role, batch: BatchSize, width: int, max_steps: int, *, here: bool
) -> dict[str, Any]:
    """Check the JSON that a run names for a role, and fill what it leaves open.

    Args:
        batch: the student's, whose micro-batches the network has too.
        width: of the network, heads x head dimension.
        max_steps: of the run.
        here: check it against this machine too.

    Raises:
        ConfigError: with all problems at once.
    """
    where, ds = ds_config.load(named)
    lr, problems = EngineOverrides(lr=role.lr), []
    for _, value, what, _ in contradictions(ds, lr, batch.ranks):
        problems.append(f"`{role.name}_lr` is {value}, but `{KEY}` names {where}, where {what}. Keep one.")
    ds = fill_steps(fill_auto(apply_overrides(ds, lr), width), max_steps * role.updates)
    sizes = dict(zip(BATCH_KEYS, (batch.total, batch.micro, batch.accumulation), strict=True))
    for key, size in sizes.items():
        if ds.get(key, size) != size:
            remedy = (
                f"{role.name.capitalize()} and student have the same batches; write {size}, or leave it out."
            )
            problems.append(f"{where}: `{key}` is {ds[key]}. {remedy}")
    try:
        ds, _ = ds_config.student_engine(where, ds | sizes, batch.ranks, f"`{role.name}_lr` in the objective")
        problems += config_problems(where, without_block(ds), here=here)
        problems += kernel_problems(where, ds, here=here)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return ds
