"""The student's DeepSpeed JSON before its checks: short flags written into it, and "auto" filled."""

import copy
from dataclasses import replace
from typing import Any, TypeVar

from wandistiller.engine.ds_json import OPEN, DeepSpeedJson
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK, PEAKS

J = TypeVar("J", bound=DeepSpeedJson)
TOTAL, MICRO, ACCUMULATION = BATCH_KEYS
OFFLOAD = "zero_optimization.offload_optimizer"
OVERRIDES = ("batch_size", "lr", "mixed_precision", "gradient_checkpointing")
"""Settings of a run that are written into the student's JSON."""


def apply_overrides(json: J, **settings: Any) -> J:
    """Return the JSON with OVERRIDES written in; they win, and `overridden` names what they replaced.

    None changes nothing.
    """
    json = _copy(json)
    for setting, value in settings.items():
        if value is not None:
            json = _written(_copy(json), setting, value).noting(setting, value, json)
    return json


def _written(json: J, setting: str, value: Any) -> J:
    ds, schedule = json.raw, json.section("scheduler")
    if setting == "batch_size":
        if ds.get(TOTAL) not in OPEN and ds.get(MICRO) != value:
            ds.pop(ACCUMULATION, None)  # it follows from the other two
        ds[MICRO] = value
    elif setting == "lr":
        ds.setdefault("optimizer", {"type": "AdamW"})
        # into nothing, if they are no objects: reported when the engine is checked
        json.section("optimizer").setdefault("params", {})
        json.section("optimizer.params")["lr"] = value
        # deepspeed 0.19.8 trains with the schedule's rate, 0.001 where it is left out
        if key := PEAKS.get(json.schedule):
            schedule.setdefault("params", {})
            json.section("scheduler.params")[key] = value
    elif setting == "mixed_precision":
        json = json.in_precision(value)
    else:
        if value:
            ds.setdefault("activation_checkpointing", {"partition_activations": False})
        else:
            ds.pop("activation_checkpointing", None)
        lost = "checkpoint_but_last" if value else "checkpoint"
        if block := json.section(BLOCK):
            ds[BLOCK] = {key: v for key, v in block.items() if not key.startswith(lost)}
    return json


def _copy(json: J) -> J:
    return replace(json, raw=copy.deepcopy(json.raw))


def fill_auto(json: J, max_steps: int) -> J:
    """Fill "auto" as transformers' Trainer does by default, or leave it out.

    The precision is bf16, as in the shipped JSONs. Without an optimizer a schedule's rate is AdamW's. An
    optimizer whose place is "auto" is in CPU memory unless `planner.resolve_auto` has room for it, and blocks
    are eager unless `planner.compiling` makes them compiled.
    Source: transformers 5.23, integrations/deepspeed.py, HfTrainerDeepSpeedConfig, and TrainingArguments.

    Args:
        max_steps: of the run, for a schedule that must know its length.
    """
    json = _copy(json)
    ds, fp16 = json.raw, json.section("fp16").get("enabled")
    if "auto" in map(ds.get, BATCH_KEYS) and ds.get(MICRO) in OPEN and ds.get(TOTAL) in OPEN:
        ds[MICRO] = 8
    peak = json.section("scheduler.params").get(PEAKS.get(json.schedule))
    if "optimizer" not in ds and peak not in OPEN:
        ds["optimizer"] = {"type": "AdamW", "params": {"lr": peak}}
    if fp16 == "auto":
        ds.setdefault("bf16", {"enabled": "auto"})
    if json.section("bf16").get("enabled") == "auto":
        ds["bf16"]["enabled"] = fp16 is not True
    lr = json.section("optimizer.params").get("lr", "auto")
    lr = 5e-5 if lr == "auto" else lr
    filled = {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "warmup_max_lr": lr}
    filled |= {"warmup_min_lr": 0, "warmup_num_steps": 1, "total_num_steps": max_steps, "stage": 2}
    offload = json.section(OFFLOAD)
    if is_offload_open := offload.get("device") == "auto":
        offload["device"] = "cpu"
    if is_compile_open := json.section(BLOCK).get("compile") == "auto":
        del ds[BLOCK]["compile"]
        if not ds[BLOCK]:
            del ds[BLOCK]
    block = {key: ds[key] for key in (BLOCK,) if key in ds}
    opened = {"is_offload_open": is_offload_open, "is_compile_open": is_compile_open}
    return replace(json, raw=_without_auto(ds, filled) | block, **opened)


def _without_auto(section: dict[str, Any], filled: dict[str, Any]) -> dict[str, Any]:
    values = {key: filled.get(key) if value == "auto" else value for key, value in section.items()}
    values |= {key: _without_auto(v, filled) for key, v in values.items() if isinstance(v, dict)}
    return {key: value for key, value in values.items() if value is not None}
