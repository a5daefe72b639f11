"""Reads and checks the two DeepSpeed JSONs; DeepSpeed itself ignores unknown top-level keys (0.19.8)."""

import copy
from functools import cache
from typing import Any

from wandistiller.engine.batch_size import batch_size
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.engine.ds_schema import (
    BATCH_KEYS,
    BLOCK,
    OPTIMIZERS,
    PARAMS,
    PEAKS,
    RENAMED,
    SCHEDULERS,
    params_of,
    section_types,
)
from wandistiller.engine.engine_config import RECOMPUTED, CheckpointPolicy, EngineConfig, Kernels
from wandistiller.utils.errors import RECIPE, ConfigError, nearest, unknown_keys
from wandistiller.utils.files import read_json
from wandistiller.utils.validation import check, types_of, value_problems

# deepspeed 0.19.8 would allocate for 5e8 numbers, 2 GB in float32, however small the student
BUCKETS = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
# deepspeed 0.19.8 would keep up to 1e9 gathered parameters, 4 GB in float32, and fetch 5e7 ahead
LEAN_STAGE_3 = {
    "stage3_param_persistence_threshold": 10_000,
    "stage3_max_live_parameters": 100_000_000,
    "stage3_prefetch_bucket_size": 20_000_000,
    "stage3_max_reuse_distance": 100_000_000,
}
REFUSED = (
    *("gradient_predivide_factor", "prescale_gradients", "bf16.bf16_master_weights_and_grads"),
    "fp16.fp16_master_weights_and_grads",
    *(f"zero_optimization.offload_optimizer.{key}" for key in ("super_offload", "ratio")),
    "activation_checkpointing.contiguous_memory_optimization",
    *(
        f"zero_optimization.zero_quantized_{what}"
        for what in ("weights", "gradients", "nontrainable_weights")
    ),
    *(f"zero_optimization.{key}" for key in ("memory_efficient_linear", "legacy_stage1", "zenflow")),
    "zero_optimization.stage3_module_granularity_threshold",
)
"""Settings of a student that round or delay updates, fail here, or are gone (deepspeed 0.19.8)."""
NOT_OFFERED = (
    *("amp", "hybrid_engine", "curriculum_learning", "progressive_layer_drop", "sparse_attention"),
    *("sparse_gradients", "pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"),
    *("compression_training", "quantize_training", "weight_quantization", "graph_harvesting", "autotuning"),
    *("elasticity", "nebula", "datastates_ckpt", "compile", "data_efficiency", "eigenvalue"),
    *("torch_autocast", "data_types", "flops_profiler"),
)
"""Sections of DeepSpeed that fit neither a frozen teacher nor this student, or that it has removed."""
INSTEAD = "It does not go with these engines. Remove it; ds_configs/README.md has what there is."
REMARKS = ("_", "/", "#")
"""First characters of keys that hold remarks; so does `comment`."""


@cache
def shipped_json(file: str) -> DeepSpeedJson:
    """Read a shipped DeepSpeed JSON, such as ds_configs/student/zero2.json, once in a process."""
    return load(file)


def load(source: str | dict[str, Any], where: str = RECIPE) -> DeepSpeedJson:
    """Read a DeepSpeed JSON, a file or a recipe's object, whose place is `where`."""
    if isinstance(source, dict):
        return DeepSpeedJson(where, _as_read(source))
    return DeepSpeedJson(source, _as_read(read_json(source)))


def _as_read(ds: dict[str, Any]) -> dict[str, Any]:
    """Return a copy without remarks, null, which is a default, and sections that are switched off."""
    of_deepspeed = {key: value for key, value in ds.items() if key != BLOCK}
    on = {k: v for k, v in of_deepspeed.items() if k not in NOT_OFFERED or is_on(v, default=1.0)}
    return _without_remarks(on) | {key: ds[key] for key in (BLOCK,) if key in ds}


def _without_remarks(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_remarks(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_remarks(v)
        for key, v in value.items()
        if v is not None and not key.startswith(REMARKS) and key.lower() not in ("comment", "comments")
    }


def key_problems(json: DeepSpeedJson) -> list[str]:
    """List unknown keys and wrong values of all sections."""
    problems = [json.problem(key, json.raw[key], INSTEAD) for key in NOT_OFFERED if key in json.raw]
    json, where = json.without(*NOT_OFFERED), json.where
    for name, types in section_types().items():
        section = dict(json.section(name))
        prefix = f"{name}." if name else ""
        for key in sorted(section.keys() & RENAMED.keys()):
            remedy = f"Unknown key. Did you mean `{RENAMED[key]}`?"
            problems.append(json.problem(prefix + key, section.pop(key), remedy))
        problems += check(where, section, types, prefix)[0]
    for name, types in PARAMS.items():
        problems += value_problems(where, json.section(name), types, f"{name}.")
    problems += _typed_problems(json, "optimizer", OPTIMIZERS)
    return problems + _typed_problems(json, "scheduler", SCHEDULERS)


def _typed_problems(json: DeepSpeedJson, section: str, types: tuple[str, ...]) -> list[str]:
    """List problems of {"type": ..., "params": {...}}: a wrong type, unknown and missing settings."""
    if not isinstance(json.raw.get(section), dict):
        return []  # left out, or reported already
    keys, kind = json.raw[section].keys(), json.raw[section].get("type")
    if "type" not in keys and keys - {"params"}:
        return []  # an unknown key, reported already, is likely its misspelling
    params = json.raw[section].get("params", {})
    # of a schedule DeepSpeed knows the exact name alone
    same = [t for t in types if kind == t or (section == "optimizer" and f"{kind}".lower() == t.lower())]
    if not same:
        remedy = f"Write one of: {', '.join(types)}.{nearest(kind, types)}"
        return [json.problem(f"{section}.type", kind, remedy)]
    if not isinstance(params, dict):
        return []  # reported already
    known = params_of(same[0])
    problems = [
        f"{json.where}: `{section}.params.{key}` is missing; {same[0]} has no default for it. Write it."
        for key, required in known.items()
        if required and key not in params
    ]
    return problems + (unknown_keys(json.where, params, known, f"{section}.params.") if known else [])


def student_engine(json: DeepSpeedJson, world: int) -> EngineConfig:
    """Check the student's JSON and write out what DeepSpeed would otherwise choose in silence.

    Raises:
        ConfigError: with all problems at once.
    """
    problems = key_problems(json.without(BLOCK)) + rate_problems(json) + offload_problems(json)
    problems += block_problems(json) + student_problems(json)
    try:
        batch = batch_size(json, world)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    ds = copy.deepcopy(json.raw)
    for key, value in zip(BATCH_KEYS, (batch.total, batch.micro, batch.accumulation), strict=True):
        ds[key] = value
    ds.setdefault("gradient_clipping", 1.0)  # DeepSpeed's silent default, written out
    # 0 by DeepSpeed's own Adam (0.19.8), 0.01 by torch's AdamW (2.13)
    ds["optimizer"].setdefault("params", {}).setdefault("weight_decay", 0.0)
    complete(ds)
    ds["zero_optimization"].setdefault("stage", 1)  # DeepSpeed's own default, 0, saves nothing
    zero = ds["zero_optimization"]
    ds["zero_optimization"] = BUCKETS | (LEAN_STAGE_3 if zero["stage"] == 3 else {}) | zero
    if "comet" in ds:
        ds["comet"].setdefault("samples_log_interval", 1)  # in our steps; DeepSpeed's own is 100
    opened = json.is_open, json.is_offload_open, json.is_compile_open
    return EngineConfig(json.where, ds, json.overridden, *opened)


def student_problems(json: DeepSpeedJson) -> list[str]:
    """List the settings that a student's JSON may not have, with the reason."""
    problems = []
    for path in REFUSED:
        section, _, key = path.rpartition(".")
        if is_on(value := json.section(section).get(key), default=1.0) or value == {}:
            problems.append(json.problem(path, value, INSTEAD))
    zero, clips = json.section("zero_optimization"), json.raw.get("gradient_clipping", 1) != 0
    if zero.get("compute_grad_norm") is False and clips:
        remedy = "Without the norm nothing can be clipped. Write `gradient_clipping`: 0, or remove it."
        problems.append(json.problem("zero_optimization.compute_grad_norm", False, remedy))
    if json.section("fp16").get("enabled") is True and zero.get("stage") == 0:  # its pull request 8393
        remedy = "At stage 0 DeepSpeed does not scale the loss, and hardly anything is learned. "
        problems.append(json.problem("fp16.enabled", True, f"{remedy}Write `stage`: 1, or bf16."))
    if json.section("comet").get("api_key"):  # which would be written to OUTPUT/resolved
        problems.append(
            f"{json.where}: `comet.api_key` is a secret. Remove it, and set COMET_API_KEY in the environment."
        )
    return problems


def is_on(value: Any, default: float = 0.0) -> bool:
    """Return whether a setting has an effect: true, an enabled section, or a number that is no default."""
    if isinstance(value, dict):
        return value.get("enabled", True) not in (False, None, "auto") and any(value.values())
    return value is True or (type(value) in (int, float) and value not in (0, default))


def rate_problems(json: DeepSpeedJson) -> list[str]:
    """Name a learning rate that is left out, for which deepspeed 0.19.8 takes a default in silence."""
    give = 'Give --lr, or "lr" in the recipe'
    if "optimizer" not in json.raw:
        section = '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}'
        return [
            f"{json.where}: no `optimizer` section, which would be AdamW, but no learning rate is known. "
            f"{give}, or write {section} here."
        ]
    section, key = ("scheduler", peak) if (peak := PEAKS.get(json.schedule)) else ("optimizer", "lr")
    params = json.section(section).get("params", {})
    if not isinstance(params, dict) or key in params:
        return []
    return [
        f"{json.where}: `{section}.params.{key}` is missing, and DeepSpeed would train at a default of its "
        f"own. {give}, or write it."
    ]


def block_problems(json: DeepSpeedJson) -> list[str]:
    """List the problems of the block "wandistiller", and kernels that cannot learn or do not fit the rest."""
    policy, block = types_of(CheckpointPolicy), json.section(BLOCK)
    problems, _ = check(json.where, json.raw.get(BLOCK, {}), policy | types_of(Kernels), f"{BLOCK}.")
    if block.get("attention") == "sage":
        remedy = "It has no backward pass. Write another, such as flash."
        problems.append(json.problem(f"{BLOCK}.attention", "sage", remedy))
    if block.get("compile") is True and json.stage == 3:
        remedy = "ZeRO-3 fetches weights inside of the blocks. Leave it out, or write stage 2."
        problems.append(json.problem(f"{BLOCK}.compile", True, remedy))
    if block.get("compile") is True and block.get("checkpoint", "blocks") != "blocks":
        remedy = f'Compiled blocks are recomputed whole: leave `{BLOCK}.checkpoint` out, or write "blocks".'
        problems.append(json.problem(f"{BLOCK}.compile", True, remedy))
    if policy.keys() & block.keys() and RECOMPUTED not in json.raw:
        text = f"`{BLOCK}` says what is checkpointed, but there is no `{RECOMPUTED}`. Add it: {{}} will do."
        problems.append(f"{json.where}: {text}")
    return problems


def offload_problems(json: DeepSpeedJson) -> list[str]:
    """List offload sections that DeepSpeed would ignore in silence, or stop at long after the start."""
    problems, stage = [], json.stage
    known = stage in (0, 1, 2, 3)  # or it is reported already
    for target, stages in (("param", (3,)), ("optimizer", (1, 2, 3))):
        key = f"zero_optimization.offload_{target}"
        section = json.section(key)
        if known and stage not in stages and section.get("device", "none") != "none":
            remedy = f"Remove it, or write stage {' or '.join(map(str, stages))}."
            problems.append(json.problem(key, section, f"It has no effect at stage {stage}. {remedy}"))
        if section.get("device") == "nvme" and not section.get("nvme_path"):
            remedy = "Write a folder on a fast disk."
            problems.append(json.problem(f"{key}.nvme_path", section.get("nvme_path"), remedy))
    return problems


def complete(ds: dict[str, Any]) -> None:
    """Write out in place what both engines need and DeepSpeed would choose otherwise."""
    ds.setdefault("steps_per_print", 10**9)  # our own line a step says more
    # it lets the host wait for the GPU at each forward pass and step (deepspeed 0.19.8)
    ds.setdefault("timers", {}).setdefault("throughput", {"enabled": False})
    # true swaps torch's linear for the whole process and changes bf16 numerics (deepspeed 0.19.8)
    ds.setdefault("zero_optimization", {}).setdefault("memory_efficient_linear", False)
