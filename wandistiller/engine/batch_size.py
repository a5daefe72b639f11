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


def unshared(total: int, ranks: int, micro: int | None, accumulation: int | None) -> str:
    """Say that `ranks` cannot share `total` samples, and how many can; None: a number that is left open."""
    each = (micro or 1) * (accumulation or 1)
    how = f", {micro} at a time" * bool(micro) + f" in {accumulation} micro-steps" * bool(accumulation)
    *others, most = [str(n) for n in range(1, max(8, 2 * ranks) + 1) if total % (n * each) == 0] or [""]
    use = f"use {', '.join(others)}{' or ' if others else ''}{most}, or " if most else ""
    samples, shared = f"{total} sample{'s' * (total > 1)}", f"{ranks} rank{'s' * (ranks > 1)}"
    return f"{samples} cannot be shared by {shared}{how}; {use}write a multiple of {ranks * each}."


def batch_size(json: DeepSpeedJson, world: int) -> BatchSize:
    """Solve micro * accumulation * ranks = total for what the JSON leaves out, as DeepSpeed does.

    Raises:
        ConfigError: nothing is given, a value is no positive integer, or the numbers do not multiply up.
    """
    if wrong := value_problems(json.where, json.raw, dict.fromkeys(BATCH_KEYS, Count)):
        raise ConfigError(*wrong)
    total, micro, accumulation = in_json = [json.raw.get(k) for k in BATCH_KEYS]
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
    if not micro or not accumulation:
        least = (micro or 1) * (accumulation or 1) * world
        raise ConfigError(
            json.problem("train_batch_size", total, f"On {world} rank(s) it must be at least {least}.")
        )
    if total not in (None, micro * accumulation * world) and None in in_json:
        raise ConfigError(json.problem("train_batch_size", total, unshared(total, world, *in_json[1:])))
    if total not in (None, micro * accumulation * world):
        raise ConfigError(
            f"{json.where}: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x {world} ranks = {micro * accumulation * world}. "
            "Change one of them, or leave one out."
        )
    return BatchSize(micro, accumulation, micro * accumulation * world)
