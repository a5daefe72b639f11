"""Reads and checks the two DeepSpeed JSONs. DeepSpeed ignores unknown top-level keys in silence (0.19.8); we do not."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wandistiller.config import ConfigError, problem, read_json, unknown_keys

# Keys that DeepSpeed 0.19.8 reads; tests/test_deepspeed_json.py compares the sections with DeepSpeed's own classes.
TOP_KEYS = set(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "optimizer scheduler fp16 bf16 torch_autocast zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer gradient_clipping activation_checkpointing aio steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state disable_allgather communication_data_type seq_parallel_communication_data_type "
    "prescale_gradients gradient_predivide_factor gradient_allreduce_op checkpoint data_types dataloader_drop_last "
    "flops_profiler comms_logger tensorboard wandb csv_monitor comet compile data_efficiency eigenvalue "
    "disable_python_gc log_level checkpoint_tag_validation use_data_before_expert_parallelism timers".split()
)
SECTION_KEYS = {
    "zero_optimization": set(
        "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload "
        "cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks "
        "ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights log_trace_cache_warnings "
        "memory_efficient_linear offload_optimizer offload_param overlap_comm override_module_apply "
        "parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients "
        "save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold "
        "stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size "
        "stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce zenflow "
        "zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights "
        "zero_quantized_weights".split()
    ),
    "zero_optimization.offload_param": set("buffer_count buffer_size device max_in_cpu nvme_path pin_memory".split()),
    "zero_optimization.offload_optimizer": set(
        "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio "
        "super_offload".split()
    ),
    "fp16": set(
        "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power "
        "loss_scale loss_scale_window min_loss_scale".split()
    ),
    "bf16": set(
        "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update".split()
    ),
    "activation_checkpointing": set(
        "contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile "
        "synchronize_checkpoint_boundary".split()
    ),
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
}
OPTIMIZER_KEYS = {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "bias_correction", "amsgrad",
                  "fp32_optimizer_states"}  # fmt: skip
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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
    """Unknown keys, at the top and in the sections, and the value "auto", which DeepSpeed itself cannot read."""
    found = unknown_keys(where, ds, TOP_KEYS)
    for section, known in SECTION_KEYS.items():
        value: Any = ds
        for part in section.split("."):
            value = value.get(part, {}) if isinstance(value, dict) else value
        if not isinstance(value, dict):
            found.append(problem(where, section, value, "Write an object, {...}."))
        else:
            found += unknown_keys(where, value, known, section + ".")
    optimizer = ds.get("optimizer", {})
    if isinstance(optimizer, dict) and str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        found += unknown_keys(where, optimizer.get("params", {}), OPTIMIZER_KEYS, "optimizer.params.")
    found += [problem(where, key, "auto", "Write the value itself.") for key in _auto(ds)]
    return found


def _auto(value: Any, prefix: str = "") -> list[str]:
    if isinstance(value, dict):
        return [k for key, v in value.items() for k in _auto(v, f"{prefix}.{key}" if prefix else key)]
    return [prefix] if value == "auto" else []


def stage(ds: dict[str, Any]) -> int:
    return ds.get("zero_optimization", {}).get("stage", 0)


def dtype_name(ds: dict[str, Any]) -> str:
    """The precision that the JSON's bf16 or fp16 section asks for, else float32."""
    for section, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if ds.get(section, {}).get("enabled", False):
            return name
    return "float32"


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
    found = key_problems(where, ds)
    if "optimizer" not in ds:
        found.append(f"{where}: no `optimizer` section. Write one, for example AdamW with its lr.")
    if stage(ds) not in (0, 1, 2, 3):
        found.append(problem(where, "zero_optimization.stage", stage(ds), "Write 0, 1, 2 or 3."))
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
    ds.setdefault("steps_per_print", 10**9)  # our own line a step says more
    # true swaps torch.nn.functional.linear for the whole process (deepspeed 0.19.8), which changes bf16 numerics
    ds.setdefault("zero_optimization", {}).setdefault("memory_efficient_linear", False)
    return ds, batch


def teacher_engine(where: str, ds: dict[str, Any]) -> dict[str, Any]:
    """Check the teacher's JSON and complete it with what an engine without an optimizer needs.

    Raises:
        ConfigError: with all problems at once.
    """
    found = key_problems(where, ds)
    if stage(ds) not in (0, 3):
        found.append(problem(where, "zero_optimization.stage", stage(ds),
                             "A frozen teacher has no optimizer; use 0 (replicated) or 3 (sharded)."))  # fmt: skip
    found += [
        problem(where, key, ds[key], "A frozen teacher takes none; remove this section.")
        for key in ("optimizer", "scheduler") if key in ds
    ]
    if found:
        raise ConfigError(*found)
    ds = copy.deepcopy(ds)
    for key in BATCH_KEYS:  # without an optimizer they mean nothing, but DeepSpeed wants one
        ds.pop(key, None)
    ds["train_micro_batch_size_per_gpu"] = 1
    ds.setdefault("steps_per_print", 10**9)
    ds.setdefault("zero_optimization", {}).setdefault("memory_efficient_linear", False)
    return ds
