"""The student's DeepSpeed JSON before its checks: short flags written into it, and "auto" filled."""

import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from wandistiller.engine.ds_json import OPEN, DeepSpeedJson
from wandistiller.engine.ds_schema import BATCH_KEYS, MODELS, MUON_RATES, PEAKS

J = TypeVar("J", bound=DeepSpeedJson)
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
"""--mixed_precision -> the precision of the engine."""
TOTAL, MICRO, ACCUMULATION = BATCH_KEYS


@dataclass(frozen=True, slots=True)
class EngineOverrides:
    """Short flags for the student's engine; None changes nothing."""

    batch_size: int | None = None
    """Samples per rank and micro-step."""
    lr: float | None = None
    mixed_precision: str | None = None
    gradient_checkpointing: bool | None = None


def apply_overrides(json: J, overrides: EngineOverrides) -> J:
    """Return the JSON with the flags written in; a flag wins, and `overridden` names what it replaced."""
    json = _copy(json)
    for setting, value in asdict(overrides).items():
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
        params = json.section("optimizer.params")
        params["lr"] = value
        for key in MUON_RATES:  # which would win over it
            params.pop(key, None)
        # deepspeed 0.19.8 trains with the schedule's rate, 0.001 where it is left out
        if key := PEAKS.get(json.schedule):
            schedule.setdefault("params", {})
            json.section("scheduler.params")[key] = value
    elif setting == "mixed_precision":
        json = json.in_precision(PRECISIONS[value])
    elif value:
        ds.setdefault("activation_checkpointing", {"partition_activations": False})
    else:
        ds.pop("activation_checkpointing", None)
    return json


def _copy(json: J) -> J:
    return replace(json, raw=copy.deepcopy(json.raw))


def fill_auto(json: DeepSpeedJson, width: int) -> DeepSpeedJson:
    """Fill "auto" as transformers' Trainer does with its defaults; `fill_steps` has the rest.

    Two differ: the precision is bf16, as in the shipped JSONs, and a batch size that follows from others is
    left out. Without an optimizer a schedule's rate is AdamW's.
    Source: transformers 5.23, integrations/deepspeed.py, HfTrainerDeepSpeedConfig, and TrainingArguments.

    Args:
        width: of the student, heads x head dimension; bucket sizes depend on it.
    """
    json = _copy(json)
    ds, of_optimizer = json.raw, json.section("optimizer.params")
    left_open = [key for key in BATCH_KEYS if ds.get(key) == "auto"]
    for key in left_open:
        del ds[key]
    if left_open and MICRO not in ds and TOTAL not in ds:
        ds[MICRO] = 8
    of_schedule, peak = json.section("scheduler.params"), PEAKS.get(json.schedule)
    if "optimizer" not in ds and (rate := of_schedule.get(peak)) not in OPEN:
        ds["optimizer"] = {"type": "AdamW", "params": {"lr": rate}}
    lr = 5e-5 if of_optimizer.get("lr") in OPEN else of_optimizer["lr"]
    fp16 = json.section("fp16").get("enabled")
    if fp16 == "auto" and "bf16" not in ds:
        ds["bf16"] = {"enabled": "auto"}
    of_trainer = {
        "": {"gradient_clipping": 1.0, "steps_per_print": 10**9},
        "optimizer.params": {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "scheduler.params": {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": 1},
        "bf16": {"enabled": fp16 is not True},
        "fp16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        },
    }
    for section in of_trainer | MODELS:
        given, values = json.section(section), of_trainer.get(section, {})
        for key in [key for key, value in given.items() if value == "auto"]:
            if key in values:
                given[key] = values[key]
            elif section in MODELS:  # which takes it for the default
                del given[key]
    return json


def fill_steps(json: DeepSpeedJson, max_steps: int) -> DeepSpeedJson:
    """Fill what a schedule must know of the length of the run, once that is known."""
    json = _copy(json)
    if (params := json.section("scheduler.params")).get("total_num_steps") == "auto":
        params["total_num_steps"] = max_steps
    return json
