"""Reads and checks the two DeepSpeed JSONs. DeepSpeed ignores unknown top-level keys in silence (0.19.8); we do not."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistiller.config import read_json
from wandistiller.deepspeed_keys import BATCH_KEYS, OPTIMIZER_KEYS, OPTIMIZERS, SCHEDULER_KEYS, SECTION_KEYS, TOP_KEYS
from wandistiller.deepspeed_values import REQUIRED, inner, value_problems
from wandistiller.placement import BLOCK, placement_problems
from wandistiller.problems import ConfigError, nearest, problem, unknown_keys
from wandistiller.recompute import recompute_problems
from wandistiller.refused import student_problems

TEACHER_REFUSES = {
    # deepspeed 0.19.8 makes its groups once in a process and stops at the second expert's, or at initialize
    "zero_hpz_partition_size": 'A frozen teacher needs no second part: remove it, and write "wandistiller": {"shards": "node"}, '
                               "which keeps all its weights within a node.",
    "zero_quantized_weights": "It would change the teacher's answers; remove it.",
    "zero_quantized_nontrainable_weights": "It would change the teacher's answers; remove it.",
    "legacy_stage1": "DeepSpeed has removed it; remove it.",
    "zenflow": "A frozen teacher has no optimizer; remove it.",
}

BUCKETS = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
"""deepspeed 0.19.8 would allocate for 5e8 numbers, 2 GB in float32, however small the student."""
# deepspeed 0.19.8 would keep up to 1e9 gathered parameters, 4 GB in float32, and fetch 5e7 ahead
LEAN_STAGE_3 = {
    "stage3_param_persistence_threshold": 10_000, "stage3_max_live_parameters": 100_000_000,
    "stage3_prefetch_bucket_size": 20_000_000, "stage3_max_reuse_distance": 100_000_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Samples per rank and micro-step, micro-steps per optimizer step, samples per optimizer step."""

    micro: int
    accumulation: int
    total: int

    @property
    def ranks(self) -> int:
        return self.total // (self.micro * self.accumulation)


def load(source: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A DeepSpeed section given as a file name or, in a recipe, as an object; returns (name for messages, content)."""
    if isinstance(source, dict):
        return "recipe", copy.deepcopy(source)
    return source, read_json(source)


def key_problems(where: str | Path, ds: dict[str, Any]) -> list[str]:
    """Unknown keys and values that cannot be, at the top and in the sections, and "auto", which DeepSpeed itself cannot read."""
    found = unknown_keys(where, ds, TOP_KEYS)
    for section, known in SECTION_KEYS.items():
        found += unknown_keys(where, inner(ds, section), known, section + ".")
    found += value_problems(where, ds)
    found += _typed_problems(where, ds, "optimizer", {name: OPTIMIZER_KEYS for name in OPTIMIZERS[:2]}, OPTIMIZERS)
    found += _typed_problems(where, ds, "scheduler", SCHEDULER_KEYS, tuple(SCHEDULER_KEYS))
    found += [problem(where, key, "auto", "Write the value itself.") for key in _auto(ds)]
    return found


def _typed_problems(
    where: str | Path, ds: dict[str, Any], section: str, keys: dict[str, set[str]], types: tuple[str, ...]
) -> list[str]:
    """What is wrong with {"type": ..., "params": {...}}."""
    if not isinstance(given := ds.get(section), dict):
        return []  # left out, or said already
    if "type" not in given and set(given) - {"params"}:
        return []  # an unknown key, said already, is likely its misspelling
    kind, params = given.get("type"), given.get("params", {})
    same = [t for t in types if isinstance(kind, str) and t.lower() == kind.lower()]
    if not same:
        return [problem(where, f"{section}.type", kind, f"Write one of: {', '.join(types)}.{nearest(kind, types)}")]
    if not isinstance(params, dict):
        return []  # said already
    missing = [key for key in REQUIRED.get(same[0], ()) if key not in params]
    found = [f"{where}: `{section}.params.{key}` is missing, which {same[0]} has no default for. Write it." for key in missing]
    return found + (unknown_keys(where, params, keys[same[0]], f"{section}.params.") if same[0] in keys else [])


def _auto(value: Any, prefix: str = "") -> list[str]:
    if isinstance(value, dict):
        return [k for key, v in value.items() for k in _auto(v, f"{prefix}.{key}" if prefix else key)]
    return [prefix] if value == "auto" else []


def stage(ds: dict[str, Any]) -> int:
    return ds.get("zero_optimization", {}).get("stage", 0)


def offload_device(ds: dict[str, Any]) -> str:
    """Where ZeRO-3 keeps parameters: none (the accelerator), cpu or nvme."""
    return ds.get("zero_optimization", {}).get("offload_param", {}).get("device", "none")


def on_nvme(ds: dict[str, Any]) -> str | None:
    """The first offload section that puts something on a disk."""
    zero = ds.get("zero_optimization", {})
    sections = ("offload_param", "offload_optimizer")
    return next((key for key in sections if zero.get(key, {}).get("device") == "nvme"), None)


def dtype_name(ds: dict[str, Any]) -> str:
    """The precision that the JSON's bf16 or fp16 section asks for, else float32."""
    for section, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if inner(ds, section).get("enabled", False):
            return name
    return "float32"


def with_dtype(ds: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """`ds` in another precision, if one is asked for."""
    if dtype is None:
        return ds
    sections = {"bfloat16": "bf16", "float16": "fp16"}
    rest = {k: v for k, v in ds.items() if k not in sections.values()}
    return rest | ({sections[dtype]: {"enabled": True}} if dtype in sections else {})


def batch_size(where: str, ds: dict[str, Any], world: int) -> BatchSize:
    """Solve micro * accumulation * ranks = total for what the JSON leaves out, as DeepSpeed does.

    Raises:
        ConfigError: nothing is given, a value is no positive integer, or the numbers do not multiply up.
    """
    given = {k: ds[k] for k in BATCH_KEYS if k in ds}
    wrong = [problem(where, k, v, "Write a positive integer.") for k, v in given.items() if type(v) is not int or v < 1]
    if wrong:
        raise ConfigError(*wrong)
    total, micro, accumulation = (given.get(k) for k in BATCH_KEYS)
    if total is None and micro is None:
        raise ConfigError(f"{where}: no batch size. Write `train_batch_size`, `train_micro_batch_size_per_gpu` or both.")
    if total is None:
        accumulation = accumulation or 1
    elif micro is None:
        accumulation = accumulation or 1
        micro = total // (accumulation * world)
    elif accumulation is None:
        accumulation = total // (micro * world)
    if not micro or not accumulation:
        least = (micro or 1) * (accumulation or 1) * world
        raise ConfigError(problem(where, "train_batch_size", total, f"On {world} rank(s) it must be at least {least}."))
    if total is not None and micro * accumulation * world != total:
        raise ConfigError(
            f"{where}: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
            f"gradient_accumulation_steps {accumulation} x {world} ranks = {micro * accumulation * world}. "
            "Change one of them, or leave one out."
        )
    return BatchSize(micro, accumulation, micro * accumulation * world)


def student_engine(where: str, ds: dict[str, Any], world: int) -> tuple[dict[str, Any], BatchSize]:
    """Check the student's JSON and write out what DeepSpeed would otherwise choose in silence.

    Raises:
        ConfigError: with all problems at once.
    """
    found = key_problems(where, {k: v for k, v in ds.items() if k != BLOCK})
    if "optimizer" not in ds:
        found.append(f"{where}: no `optimizer` section. Write one, for example AdamW with its lr.")
    zero = ds.get("zero_optimization", {})
    if isinstance(zero, dict) and zero.get("stage", 1) not in (0, 1, 2, 3):
        found.append(problem(where, "zero_optimization.stage", zero["stage"], "Write 0, 1, 2 or 3."))
    found += _offload_problems(where, ds) + recompute_problems(where, ds) + student_problems(where, ds)
    batch = None
    try:
        batch = batch_size(where, ds, world)
    except ConfigError as error:
        found += error.problems
    if found or batch is None:
        raise ConfigError(*found)
    ds = copy.deepcopy(ds)
    for key, value in zip(BATCH_KEYS, (batch.total, batch.micro, batch.accumulation), strict=True):
        ds[key] = value
    ds.setdefault("gradient_clipping", 1.0)  # DeepSpeed's silent default, written out
    _complete(ds)
    ds["zero_optimization"].setdefault("stage", 1)  # DeepSpeed's own default, 0, saves nothing
    lean = BUCKETS | (LEAN_STAGE_3 if stage(ds) == 3 else {})
    ds["zero_optimization"] = lean | ds["zero_optimization"]
    if "comet" in ds:
        ds["comet"].setdefault("samples_log_interval", 1)  # in our steps; DeepSpeed's own is 100
    return ds, batch


def teacher_engine(where: str, ds: dict[str, Any], world: int = 1) -> dict[str, Any]:
    """Check the teacher's JSON and complete it with what an engine without an optimizer needs.

    Raises:
        ConfigError: with all problems at once.
    """
    unwanted = [key for key in ("optimizer", "scheduler") if key in ds]
    found = [problem(where, key, ds[key], "A frozen teacher takes none; remove this section.") for key in unwanted]
    found += key_problems(where, {k: v for k, v in ds.items() if k not in (*unwanted, BLOCK)})
    found += placement_problems(where, ds, world)
    zero = ds.get("zero_optimization", {})
    if isinstance(zero, dict) and zero.get("stage", 0) not in (0, 3):
        found.append(problem(where, "zero_optimization.stage", zero["stage"],
                             "A frozen teacher has no optimizer; use 0 (replicated) or 3 (sharded)."))  # fmt: skip
    for key, remedy in TEACHER_REFUSES.items():
        if isinstance(zero, dict) and (zero.get(key, 0) is True or zero.get(key, 0) not in (0, 1)):
            found.append(problem(where, f"zero_optimization.{key}", zero[key], remedy))
    found += _offload_problems(where, ds)
    if found:
        raise ConfigError(*found)
    ds = copy.deepcopy(ds)
    for key in BATCH_KEYS:  # without an optimizer they mean nothing, but DeepSpeed wants one
        ds.pop(key, None)
    ds["train_micro_batch_size_per_gpu"] = 1
    _complete(ds)
    return ds


def _offload_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """Offload sections that DeepSpeed would ignore in silence, or stop at long after the start."""
    found = []
    zero = ds.get("zero_optimization", {})
    for name, stages in (("offload_param", (3,)), ("offload_optimizer", (1, 2, 3))):
        section = zero.get(name) if isinstance(zero, dict) else None
        if not isinstance(section, dict):
            continue
        key = f"zero_optimization.{name}"
        if (stage_now := zero.get("stage", 0)) not in stages and section.get("device", "none") != "none":
            found.append(problem(where, key, section, f"It has no effect at stage {stage_now}. Remove it, or "
                                                      f"write stage {' or '.join(map(str, stages))}."))  # fmt: skip
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            found.append(problem(where, f"{key}.nvme_path", section.get("nvme_path"), "Write a folder on a fast disk."))
    if all(isinstance(ds.get(k), dict) and ds[k].get("enabled") for k in ("bf16", "fp16")):
        found.append(f"{where}: `bf16` and `fp16` are both enabled. Keep one.")
    return found


def _complete(ds: dict[str, Any]) -> None:
    ds.setdefault("steps_per_print", 10**9)  # our own line a step says more
    # true swaps torch.nn.functional.linear for the whole process (deepspeed 0.19.8), which changes bf16 numerics
    ds.setdefault("zero_optimization", {}).setdefault("memory_efficient_linear", False)
