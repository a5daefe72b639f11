"""The student's DeepSpeed JSON before its checks: short flags written into it, and "auto" filled."""

import copy
from dataclasses import dataclass
from typing import Any

from wandistiller.engine.ds_config import dtype_name, with_dtype
from wandistiller.engine.ds_schema import BATCH_KEYS, section_of

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "no": "float32"}
"""--mixed_precision -> the precision of the engine."""
TOTAL, MICRO, ACCUMULATION = BATCH_KEYS


@dataclass(frozen=True, slots=True)
class EngineOverrides:
    """Short flags for the student's engine; None and False change nothing."""

    batch_size: int | None = None
    """Samples per rank and micro-step."""
    lr: float | None = None
    mixed_precision: str | None = None
    gradient_checkpointing: bool = False


def contradictions(ds: dict[str, Any], overrides: EngineOverrides) -> list[tuple[str, object, str, object]]:
    """(flag, its value, key, the JSON's value) of each flag that differs from the JSON."""
    params = _params(ds, "optimizer")
    pairs = [
        ("batch_size", overrides.batch_size, MICRO, ds.get(MICRO)),
        ("lr", overrides.lr, "optimizer.params.lr", params.get("lr")),
    ]
    fixed = {s: ds[s] for s in ("bf16", "fp16") if section_of(ds, s).get("enabled") not in (None, "auto")}
    if fixed:
        precision = next(flag for flag, dtype in PRECISIONS.items() if dtype == dtype_name(fixed))
        pairs.append(("mixed_precision", overrides.mixed_precision, "bf16 and fp16", precision))
    return [p for p in pairs if p[1] is not None and p[3] not in (None, "auto") and p[1] != p[3]]


def apply_overrides(ds: dict[str, Any], overrides: EngineOverrides) -> dict[str, Any]:
    """`ds` with the flags applied; a global batch that it fixes stays, and accumulation follows."""
    ds = copy.deepcopy(ds)
    if overrides.batch_size is not None:
        ds[MICRO] = overrides.batch_size
    if overrides.lr is not None:
        ds.setdefault("optimizer", {"type": "AdamW"})
        section_of(ds, "optimizer").setdefault("params", {})
        # into nothing, if they are no objects: reported when the engine is checked
        section_of(ds, "optimizer.params")["lr"] = overrides.lr
        if "warmup_max_lr" in _params(ds, "scheduler"):
            ds["scheduler"]["params"]["warmup_max_lr"] = overrides.lr
    if overrides.mixed_precision is not None:
        ds = with_dtype(ds, PRECISIONS[overrides.mixed_precision])
    if overrides.gradient_checkpointing:
        ds.setdefault("activation_checkpointing", {"partition_activations": False})
    return ds


def fill_auto(ds: dict[str, Any], width: int) -> dict[str, Any]:
    """Fill "auto" as transformers' Trainer does with its defaults; step counts are left to `fill_steps`.

    Two differ: the precision is bf16, as in the shipped JSONs, and a batch size that follows from others is
    left out.
    Source: transformers 5.23, integrations/deepspeed.py, HfTrainerDeepSpeedConfig, and TrainingArguments.

    Args:
        width: of the student, heads x head dimension; bucket sizes depend on it.
    """
    ds = copy.deepcopy(ds)
    left_open = [key for key in BATCH_KEYS if ds.get(key) == "auto"]
    for key in left_open:
        del ds[key]
    if left_open and MICRO not in ds and TOTAL not in ds:
        ds[MICRO] = 8
    lr = _params(ds, "optimizer").get("lr")
    lr = 5e-5 if lr in (None, "auto") else lr
    _fill(ds, {"gradient_clipping": 1.0})
    _fill(_params(ds, "optimizer"), {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})
    _fill(_params(ds, "scheduler"), {"warmup_min_lr": 0, "warmup_max_lr": lr, "warmup_num_steps": 1})
    _fill(section_of(ds, "bf16"), {"enabled": True})
    _fill(section_of(ds, "fp16"), {"enabled": False})
    buckets = {
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    _fill(section_of(ds, "zero_optimization"), buckets)
    return ds


def fill_steps(ds: dict[str, Any], max_steps: int) -> dict[str, Any]:
    """Fill what a schedule must know of the length of the run, once that is known."""
    ds = copy.deepcopy(ds)
    _fill(_params(ds, "scheduler"), {"total_num_steps": max_steps})
    return ds


def _params(ds: dict[str, Any], section: str) -> dict[str, Any]:
    """The params of optimizer or scheduler; an empty dict where there are none, or no object."""
    return section_of(ds, f"{section}.params")


def _fill(section: dict[str, Any], values: dict[str, Any]) -> None:
    section |= {key: value for key, value in values.items() if section.get(key) == "auto"}
