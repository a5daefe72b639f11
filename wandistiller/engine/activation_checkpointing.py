"""Activation checkpointing as set in the student's JSON."""

from dataclasses import dataclass
from typing import Literal

from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import BLOCK
from wandistiller.engine.kernels import Kernels, training_problems
from wandistiller.utils.validation import Count, check, types_of

SECTION = "activation_checkpointing"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """The keys of the student JSON's block "wandistiller": modules that DeepSpeed's section is applied to."""

    checkpoint: Literal["blocks", "attention", "feed_forward"] = "blocks"
    """Recomputed part: whole `blocks`, or in each only `attention` (self and cross) or `feed_forward`."""
    checkpoint_every: Count = 1
    """2: in every second block, from the first."""


def recompute_problems(json: DeepSpeedJson) -> list[str]:
    """List the problems of the section and the block."""
    own = types_of(CheckpointPolicy)
    problems, _ = check(json.where, json.raw.get(BLOCK, {}), own | types_of(Kernels), f"{BLOCK}.")
    problems += training_problems(json)
    if own.keys() & json.section(BLOCK).keys() and SECTION not in json.raw:
        problems.append(
            f"{json.where}: `{BLOCK}` says what is checkpointed, but there is no `{SECTION}`. "
            "Add it: {} will do."
        )
    section, contiguous = json.section(SECTION), "contiguous_memory_optimization"
    if section.get(contiguous) and not section.get(
        "partition_activations"
    ):  # an assertion in deepspeed 0.19.8
        remedy = "DeepSpeed has it only together with `partition_activations`: true."
        problems.append(json.problem(f"{SECTION}.{contiguous}", True, remedy))
    return problems
