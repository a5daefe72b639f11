"""Activation checkpointing, as far as the student's JSON says it: what is computed again in backward instead of kept."""

from dataclasses import dataclass, fields
from typing import Any

from wandistiller.placement import BLOCK
from wandistiller.problems import problem, unknown_keys

SECTION = "activation_checkpointing"
MODULES = {"blocks": (), "attention": ("attn1", "attn2"), "feed_forward": ("ffn",)}
"""What is computed again -> its names inside a WanTransformerBlock; the block itself for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """The keys of the student JSON's block "wandistiller"; how it is done is DeepSpeed's `activation_checkpointing`."""

    checkpoint: str = "blocks"
    """Whole `blocks`, or in each only `attention` (self and cross), or only `feed_forward`."""
    checkpoint_every: int = 1
    """2: in every second block, from the first."""

    def calls(self, layers: int) -> int:
        """Checkpoints made in one forward pass."""
        return -(-layers // self.checkpoint_every) * max(1, len(MODULES[self.checkpoint]))


def read_recompute(ds: dict[str, Any]) -> Recompute | None:
    """What a checked student JSON asks for; None if nothing is computed again."""
    return Recompute(**ds.get(BLOCK, {})) if SECTION in ds else None


def recompute_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """All that is wrong with the section and the block."""
    block, section = ds.get(BLOCK, {}), ds.get(SECTION, {})
    if not isinstance(block, dict):
        return [problem(where, BLOCK, block, "Write an object, {...}.")]
    found = unknown_keys(where, block, [f.name for f in fields(Recompute)], f"{BLOCK}.")
    if block and SECTION not in ds:
        found.append(f"{where}: `{BLOCK}` says what is checkpointed, but there is no `{SECTION}`. Add it: {{}} will do.")
    if (modules := block.get("checkpoint", "blocks")) not in MODULES:
        found.append(problem(where, f"{BLOCK}.checkpoint", modules, f"Write one of: {', '.join(MODULES)}."))
    if type(every := block.get("checkpoint_every", 1)) is not int or every < 1:
        found.append(problem(where, f"{BLOCK}.checkpoint_every", every, "Write 1 for every block, 2 for every second, ..."))
    if isinstance(section, dict) and section.get("contiguous_memory_optimization") and not section.get("partition_activations"):
        found.append(problem(where, f"{SECTION}.contiguous_memory_optimization", True,  # an assertion in deepspeed 0.19.8
                             "DeepSpeed has it only together with `partition_activations`: true."))  # fmt: skip
    return found


def with_number(ds: dict[str, Any], layers: int) -> dict[str, Any]:
    """`ds` with the number of checkpoints written out, which contiguous buffers are sized by."""
    how = read_recompute(ds)
    if how is None or not ds[SECTION].get("contiguous_memory_optimization") or "number_checkpoints" in ds[SECTION]:
        return ds
    return ds | {SECTION: ds[SECTION] | {"number_checkpoints": how.calls(layers)}}
