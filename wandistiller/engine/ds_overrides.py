"""The student's DeepSpeed JSON before its checks: short flags written into it, and "auto" filled."""

import copy
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, TypeVar

from wandistiller.engine.batch_size import unshared
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import BATCH_KEYS, MODELS, MUON_RATES, PEAKS

J = TypeVar("J", bound=DeepSpeedJson)
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
"""--mixed_precision -> the precision of the engine."""
TOTAL, MICRO, ACCUMULATION = BATCH_KEYS
OPEN = (None, "auto")
"""Values of a JSON's key that leave it to a flag."""


@dataclass(frozen=True, slots=True)
class EngineOverrides:
    """Short flags for the student's engine; None changes nothing."""

    batch_size: int | None = None
    """Samples per rank and micro-step."""
    lr: float | None = None
    mixed_precision: str | None = None
    gradient_checkpointing: bool | None = None


def contradictions(
    json: DeepSpeedJson, overrides: EngineOverrides, world: int
) -> list[tuple[str, object, str, str]]:
    """(flag, its value, what the JSON fixes against it, remedy) of each flag that differs from the JSON."""
    found, batch, lr = [], overrides.batch_size, overrides.lr
    if batch is not None and (wrong := _batch_contradiction(json, batch, world)):
        found.append(("batch_size", batch, *wrong))
    of_optimizer = json.section("optimizer.params")
    rates = {f"optimizer.params.{key}": of_optimizer.get(key) for key in ("lr", *MUON_RATES)}
    of_schedule = json.section("scheduler.params")
    rates |= {f"scheduler.params.{key}": of_schedule.get(key) for key in set(PEAKS.values())}
    if lr is not None and (others := {k: v for k, v in rates.items() if v not in (*OPEN, lr)}):
        found.append(("lr", lr, _listed(others), "Keep one."))
    precision, wanted = _fixed_precision(json, overrides.mixed_precision), overrides.mixed_precision
    if precision not in (None, wanted):
        found.append(("mixed_precision", wanted, f"`bf16 and fp16` is {precision}", "Keep one."))
    if overrides.gradient_checkpointing is False and "activation_checkpointing" in json.raw:
        section = _listed({"activation_checkpointing": json.raw["activation_checkpointing"]})
        found.append(("gradient_checkpointing", False, section, "Remove one of the two."))
    return found


def _batch_contradiction(json: DeepSpeedJson, micro: int, world: int) -> tuple[str, str] | None:
    """Return what the JSON fixes against micro-batches of `micro` samples, and the remedy, if it does."""
    fixed = {key: json.raw[key] for key in BATCH_KEYS if json.raw.get(key) not in OPEN}
    if any(type(value) is not int or value < 1 for value in fixed.values()):
        return None  # reported when the engine is checked
    if fixed.get(MICRO, micro) != micro:
        return _listed({MICRO: fixed[MICRO]}), "Keep one."
    total, accumulation = fixed.get(TOTAL), fixed.get(ACCUMULATION, 1)
    if total is None or MICRO in fixed:
        return None
    share, rest = divmod(total, world * accumulation)
    if rest:
        return _listed(fixed), unshared(total, world, micro, fixed.get(ACCUMULATION))
    if share == micro or (ACCUMULATION not in fixed and share % micro == 0):
        return None
    needed = f"{share}" if ACCUMULATION in fixed else f"a divisor of {share}"
    text = f"{_listed(fixed)}; {micro} x {accumulation if ACCUMULATION in fixed else 'accumulation'}"
    return (
        f"{text} x {world} rank(s) cannot be {total}",
        f"Write `batch_size` {needed}, or leave `batch_size` out, or change the JSON.",
    )


def _fixed_precision(json: DeepSpeedJson, wanted: str | None) -> str | None:
    """The flag's value for the precision that the JSON fixes; None if it leaves open the `wanted` one."""
    enabled = {name: json.section(name).get("enabled") for name in ("bf16", "fp16")}
    if wanted is None:
        return None
    if on := [name for name, value in enabled.items() if value is True]:
        return wanted if wanted in on else on[0]
    is_open = "auto" in enabled.values() or False not in enabled.values()
    return None if is_open and enabled.get(wanted) is not False else "no"


def _listed(values: dict[str, Any]) -> str:
    return " and ".join(f"`{key}` is {dumps(value)}" for key, value in values.items())


def apply_overrides(json: J, overrides: EngineOverrides) -> J:
    """Return the JSON with the flags applied; `contradictions` has none, or it is the default."""
    json = _copy(json)
    if overrides.batch_size is not None:
        json.raw[MICRO] = overrides.batch_size
    if overrides.lr is not None:
        json.raw.setdefault("optimizer", {"type": "AdamW"})
        json.section("optimizer").setdefault("params", {})
        # into nothing, if they are no objects: reported when the engine is checked
        json.section("optimizer.params")["lr"] = overrides.lr
        # deepspeed 0.19.8 trains with the schedule's rate, 0.001 where it is left out
        if key := PEAKS.get(json.schedule):
            json.section("scheduler").setdefault("params", {})
            json.section("scheduler.params")[key] = overrides.lr
    if overrides.mixed_precision is not None:
        json = json.in_precision(PRECISIONS[overrides.mixed_precision])
    if overrides.gradient_checkpointing:
        json.raw.setdefault("activation_checkpointing", {"partition_activations": False})
    if overrides.gradient_checkpointing is False:
        json.raw.pop("activation_checkpointing", None)
    return json


def _copy(json: J) -> J:
    return replace(json, raw=copy.deepcopy(json.raw))


def fill_auto(json: DeepSpeedJson, width: int) -> DeepSpeedJson:
    """Fill "auto" as transformers' Trainer and accelerate do with their defaults; `fill_steps` has the rest.

    Two differ: the precision is bf16, as in the shipped JSONs, and a batch size that follows from others is
    left out. Without an optimizer a schedule's rate is AdamW's.
    Source: transformers 5.23, integrations/deepspeed.py, HfTrainerDeepSpeedConfig, and TrainingArguments;
    accelerate 1.15, DeepSpeedPlugin: the stage, offload devices and `steps_per_print`.

    Args:
        width: of the student, heads x head dimension; bucket sizes depend on it.
    """
    json = _copy(json)
    ds = json.raw
    left_open = [key for key in BATCH_KEYS if ds.get(key) == "auto"]
    for key in left_open:
        del ds[key]
    if left_open and MICRO not in ds and TOTAL not in ds:
        ds[MICRO] = 8
    of_schedule, peak = json.section("scheduler.params"), PEAKS.get(json.schedule)
    if "optimizer" not in ds and (rate := of_schedule.get(peak)) not in OPEN:
        ds["optimizer"] = {"type": "AdamW", "params": {"lr": rate}}
    of_optimizer = json.section("optimizer.params")
    lr = of_optimizer.get("lr")
    lr = 5e-5 if lr in (None, "auto") else lr
    _fill(ds, {"gradient_clipping": 1.0, "steps_per_print": 10**9})
    _fill(of_optimizer, {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})
    _fill(of_schedule, {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": 1})
    fp16 = json.section("fp16")
    if fp16.get("enabled") == "auto" and "bf16" not in ds:
        ds["bf16"] = {"enabled": "auto"}
    _fill(json.section("bf16"), {"enabled": fp16.get("enabled") is not True})
    _fill(fp16, {"enabled": False})
    buckets = {
        "stage": 2,
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    _fill(json.section("zero_optimization"), buckets)
    for section in MODELS:  # whose other "auto" DeepSpeed itself takes for the default
        given = json.section(section)
        for key in [key for key, value in given.items() if value == "auto"]:
            del given[key]
    return json


def fill_steps(json: DeepSpeedJson, max_steps: int) -> DeepSpeedJson:
    """Fill what a schedule must know of the length of the run, once that is known."""
    json = _copy(json)
    _fill(json.section("scheduler.params"), {"total_num_steps": max_steps})
    return json


def _fill(section: dict[str, Any], values: dict[str, Any]) -> None:
    section |= {key: value for key, value in values.items() if section.get(key) == "auto"}
