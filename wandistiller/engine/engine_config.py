"""A checked DeepSpeed JSON and its meaning, with the keys of its block "wandistiller"."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from wandistiller.engine.batch_size import BatchSize
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK
from wandistiller.utils.validation import Count, Index, write

T = TypeVar("T")
RECOMPUTED = "activation_checkpointing"
"""DeepSpeed's section of what backward passes recompute."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of a network's blocks: keys of the block in both JSONs."""

    attention: Literal["native", "_native_cudnn", "flash", "_flash_3", "sage"] = "native"
    """Attention among the patches, by diffusers' names: torch's own choice, or one kernel for it."""
    compile: Annotated[bool | Literal["auto"], write('true, false, or "auto"')] = False
    """Compile each block by torch.compile: minutes at the start, and fewer, larger kernels. "auto" is false
    unless `planner.compiling` makes it true."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """Modules that DeepSpeed's section is applied to: keys of the block in the student's JSON."""

    checkpoint: Literal["blocks", "attention", "feed_forward"] = "blocks"
    """Recomputed part: whole `blocks`, or in each only `attention` (self and cross) or `feed_forward`."""
    checkpoint_every: Count = 1
    """2: in every second block, from the first."""
    checkpoint_but_last: Annotated[Index | Literal["auto"], write('a number of blocks, or "auto"')] = 0
    """Blocks at the end whose activations are kept; "auto" is 0 unless `planner.free_memory` has room."""

    def recomputed(self, layers: int) -> range:
        """Return which of so many blocks are recomputed, wholly or in part."""
        return range(0, layers - self.checkpoint_but_last, self.checkpoint_every)


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

    def _of_block(self, settings: type[T]) -> T:
        names = {field.name for field in fields(settings)}
        return settings(**{k: value for k, value in self.block.items() if k in names and value != "auto"})

    @property
    def for_deepspeed(self) -> dict[str, Any]:
        """The JSON without them, as DeepSpeed may see it."""
        return self.without(BLOCK).raw

    @cached_property
    def kernels(self) -> Kernels:
        return self._of_block(Kernels)

    @cached_property
    def recompute(self) -> CheckpointPolicy | None:
        """The parts that backward passes recompute; None: nothing."""
        return self._of_block(CheckpointPolicy) if RECOMPUTED in self.raw else None

    @property
    def without_recompute(self) -> Self:
        """The JSON of an engine that keeps all activations."""
        return self.without(RECOMPUTED, BLOCK)

    @property
    def empties_inputs(self) -> bool:
        """True if checkpoints partition or offload their inputs, which empties them (deepspeed 0.19.8)."""
        section = self.section(RECOMPUTED)
        return bool(section.get("partition_activations") or section.get("cpu_checkpointing"))

    @property
    def batch(self) -> BatchSize:
        total, micro, accumulation = (self.raw[key] for key in BATCH_KEYS)
        return BatchSize(micro, accumulation, total)
