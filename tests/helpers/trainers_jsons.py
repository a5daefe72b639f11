"""DeepSpeed JSONs in the forms in which trainers publish them, written for these tests; none is a copy.

trainers_jsons.txt has a form a line: name, parts that stand here, further keys, `=>`, what must come of it.
"""

import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple


class Form(NamedTuple):
    """A JSON, and what must come of it."""

    ds: dict[str, Any]
    engine: str = ""
    """Stage, precision, devices of optimizer and parameters of the engine, where it is accepted."""
    cure: str = ""
    """Part of the message that refuses it."""


def auto(*keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys, "auto")


def zero(stage: int | str, **more: Any) -> dict[str, Any]:
    """The section of a stage, with further keys."""
    return {"zero_optimization": {"stage": stage, **more}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both; sections that both have are merged, too."""
    shared = {k: merged(one[k], v) for k, v in other.items() if isinstance(v, dict) and k in one}
    return one | other | shared


BATCH = auto("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
COMMON = {"overlap_comm": True, "contiguous_gradients": True}
ON_CPU = {"device": "cpu", "pin_memory": True}
BUCKETS = auto("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
LIVE = dict.fromkeys(("sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 1e9)
ONE = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
TINY = ONE | {"bf16": {"enabled": True}}
TWO = {"allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True}
PARTS: dict[str, dict[str, Any]] = {
    "BATCH": BATCH,
    "ALL": BATCH | auto("gradient_clipping"),
    "ONE": ONE,
    "TINY": TINY,
    "BF16": {"bf16": auto("enabled")},
    "FP16": {"fp16": auto("enabled") | SCALE | {"min_loss_scale": 1}},
    "ADAMW": {"optimizer": {"type": "AdamW", "params": auto("lr", "betas", "eps", "weight_decay")}},
    "WARMUP": schedule("WarmupLR", **auto("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")),
    "STAGE2": zero(2),
    "STAGE3": zero(3),
    "TWO": zero(2, **TWO, **COMMON, reduce_bucket_size=5e8),
    "THREE": zero(3, **BUCKETS, **COMMON, **LIVE, stage3_gather_16bit_weights_on_model_save=True),
    "OPTIMIZER_ON_CPU": {"zero_optimization": {"offload_optimizer": ON_CPU}},
    "PARAMETERS_ON_CPU": {"zero_optimization": {"offload_param": ON_CPU}},
}


def read(lines: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, JSON, and what must come of it."""
    for line in lines.splitlines():
        name, parts, more, outcome = re.fullmatch(r"(.*?): ([A-Z\d_ ]*)(\{.*\})? ?=> (.*)", line).groups()
        yield name, reduce(merged, [*map(PARTS.get, parts.split()), json.loads(more or "{}")]), outcome


accepted, refused = Path(__file__).with_suffix(".txt").read_text().split("\n\n")
ACCEPTED = {name: Form(ds, engine=outcome) for name, ds, outcome in read(accepted)}
REFUSED = {name: Form(ds, cure=outcome) for name, ds, outcome in read(refused)}
