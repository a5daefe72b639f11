"""A checked DeepSpeed JSON and its meaning."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from wandistiller.engine.activation_checkpointing import SECTION, CheckpointPolicy
from wandistiller.engine.batch_size import BatchSize
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK
from wandistiller.engine.kernels import Kernels
from wandistiller.utils.validation import types_of


@dataclass(frozen=True)
class EngineConfig(DeepSpeedJson):
    """A checked and completed JSON, and its meaning."""

    @cached_property
    def zero(self) -> DeepSpeedZeroConfig:
        """The section `zero_optimization` with DeepSpeed's defaults; sizes are in elements."""
        return DeepSpeedZeroConfig(**self.section("zero_optimization"))

    @property
    def block(self) -> dict[str, Any]:
        """This package's own settings."""
        return self.raw.get(BLOCK, {})

    @property
    def for_deepspeed(self) -> dict[str, Any]:
        """The JSON without them, as DeepSpeed may see it."""
        return self.without(BLOCK).raw

    @cached_property
    def kernels(self) -> Kernels:
        names = {f.name for f in fields(Kernels)}
        return Kernels(**{key: value for key, value in self.block.items() if key in names})

    @cached_property
    def recompute(self) -> CheckpointPolicy | None:
        """The parts that backward passes recompute; None: nothing."""
        own = {key: value for key, value in self.block.items() if key in types_of(CheckpointPolicy)}
        return CheckpointPolicy(**own) if SECTION in self.raw else None

    @property
    def without_recompute(self) -> Self:
        """The JSON of an engine that keeps all activations."""
        return self.without(SECTION, BLOCK)

    @property
    def empties_inputs(self) -> bool:
        """True if checkpoints partition or offload their inputs, which empties them (deepspeed 0.19.8)."""
        section = self.section(SECTION)
        return bool(section.get("partition_activations") or section.get("cpu_checkpointing"))

    @property
    def autocast(self) -> dict[str, Any] | None:
        """The section `torch_autocast`, if it is switched on."""
        section = self.section("torch_autocast")
        return section if section.get("enabled") else None

    @property
    def batch(self) -> BatchSize:
        total, micro, accumulation = (self.raw[key] for key in BATCH_KEYS)
        return BatchSize(micro, accumulation, total)

    def with_number_of_checkpoints(self, layers: int, parts: dict[str, tuple[str, ...]]) -> Self:
        """Write out the number of checkpoints, which contiguous buffers are sized by.

        Args:
            parts: modules of a block by the recomputed part; none for the whole.
        """
        section = self.section(SECTION)
        if not self.recompute or not section.get("contiguous_memory_optimization"):
            return self
        blocks = -(-layers // self.recompute.checkpoint_every)
        number = blocks * max(1, len(parts[self.recompute.checkpoint]))
        return self.replaced(**{SECTION: {"number_checkpoints": number} | section})
