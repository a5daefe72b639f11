"""The batch of a DeepSpeed JSON: micro-batch, accumulation and their total, solved for what is left out.

`planner.resolve_auto` chooses the micro-batch where a recipe leaves the JSON to `auto`.
"""

from dataclasses import dataclass

from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import BATCH_KEYS
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.validation import Count, value_problems


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Samples per rank and micro-step, micro-steps per optimizer step, samples per optimizer step."""

    micro: int
    accumulation: int
    total: int

    @property
    def ranks(self) -> int:
        return self.total // (self.micro * self.accumulation)


def batch_size(json: DeepSpeedJson, world: int) -> BatchSize:
    """Solve micro * accumulation * ranks = total for what the JSON leaves out, as DeepSpeed does.

    Raises:
        ConfigError: nothing is given, a value is no positive integer, or the numbers do not multiply up.
    """
    if wrong := value_problems(json.where, json.raw, dict.fromkeys(BATCH_KEYS, Count)):
        raise ConfigError(*wrong)
    total, micro, accumulation = (json.raw.get(k) for k in BATCH_KEYS)
    if total is None and micro is None:
        raise ConfigError(
            f"{json.where}: no batch size. Write `train_batch_size`, `train_micro_batch_size_per_gpu` or "
            'both; --batch_size, or "batch_size" in the recipe, sets the second too.'
        )
    if total is None or micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world) if micro is None else micro
    elif accumulation is None:
        accumulation = total // (micro * world)
    if total not in (None, micro * accumulation * world):
        raise ConfigError(
            f"{json.where}: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x {world} ranks = {micro * accumulation * world}. "
            f"Write a multiple of the {world} ranks, and leave one of the other two out."
        )
    return BatchSize(micro, accumulation, micro * accumulation * world)
