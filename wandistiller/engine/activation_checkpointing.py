"""Activation checkpointing as set in the student's JSON."""

from dataclasses import dataclass
from typing import Any, Literal

from wandistiller.engine.ds_schema import BLOCK, section_of
from wandistiller.engine.kernels import Kernels, training_problems
from wandistiller.utils.errors import problem
from wandistiller.utils.validation import Count, check, types_of

SECTION = "activation_checkpointing"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """The keys of the student JSON's block "wandistiller": modules that DeepSpeed's section is applied to."""

    checkpoint: Literal["blocks", "attention", "feed_forward"] = "blocks"
    """Recomputed part: whole `blocks`, or in each only `attention` (self and cross) or `feed_forward`."""
    checkpoint_every: Count = 1
    """2: in every second block, from the first."""


def read_recompute(ds: dict[str, Any]) -> CheckpointPolicy | None:
    """Return the settings of a checked student JSON; None if nothing is recomputed."""
    own = {key: value for key, value in ds.get(BLOCK, {}).items() if key in types_of(CheckpointPolicy)}
    return CheckpointPolicy(**own) if SECTION in ds else None


def empties_inputs(ds: dict[str, Any]) -> bool:
    """Return whether checkpoints partition or offload their inputs, which empties them (deepspeed 0.19.8)."""
    section = section_of(ds, SECTION)
    return bool(section.get("partition_activations") or section.get("cpu_checkpointing"))


def recompute_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """Problems of the section and the block."""
    own = types_of(CheckpointPolicy)
    problems, _ = check(where, ds.get(BLOCK, {}), own | types_of(Kernels), f"{BLOCK}.")
    problems += training_problems(where, ds)
    if own.keys() & section_of(ds, BLOCK).keys() and SECTION not in ds:
        problems.append(
            f"{where}: `{BLOCK}` says what is checkpointed, but there is no `{SECTION}`. "
            "Add it: {} will do."
        )
    section, contiguous = section_of(ds, SECTION), "contiguous_memory_optimization"
    if section.get(contiguous) and not section.get(
        "partition_activations"
    ):  # an assertion in deepspeed 0.19.8
        remedy = "DeepSpeed has it only together with `partition_activations`: true."
        problems.append(problem(where, f"{SECTION}.{contiguous}", True, remedy))
    return problems


def with_number(ds: dict[str, Any], layers: int, parts: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """`ds` with the number of checkpoints written out, which contiguous buffers are sized by.

    Args:
        parts: modules of a block by the recomputed part; none for the whole.
    """
    policy = read_recompute(ds)
    if policy is None or not ds[SECTION].get("contiguous_memory_optimization"):
        return ds
    section, calls = dict(ds[SECTION]), -(-layers // policy.checkpoint_every)
    section.setdefault("number_checkpoints", calls * max(1, len(parts[policy.checkpoint])))
    return ds | {SECTION: section}
