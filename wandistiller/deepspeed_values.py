"""What the values of a DeepSpeed JSON may be. DeepSpeed takes most of them as they are and stops, if at all, in its engine."""

from pathlib import Path
from typing import Any

from wandistiller.kinds import kind_problems

VALUES: dict[str, dict[str, str]] = {
    "": {
        "true or false": "managed_gradient_accumulation zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "wall_clock_breakdown memory_breakdown dump_state disable_allgather prescale_gradients dataloader_drop_last "
        "disable_python_gc use_data_before_expert_parallelism",
        "a number, 0 or more": "gradient_clipping",
        "a positive number": "gradient_predivide_factor",
        "a positive integer": "steps_per_print",
        "text": "communication_data_type seq_parallel_communication_data_type gradient_allreduce_op",
        "debug, info, warning, error or critical": "log_level",
        "an object, {...}": "optimizer scheduler fp16 bf16 torch_autocast zero_optimization activation_checkpointing aio "
        "checkpoint data_types flops_profiler comms_logger tensorboard wandb csv_monitor comet compile data_efficiency "
        "eigenvalue timers",
    },
    "zero_optimization": {
        "true or false": "allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param "
        "cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters legacy_stage1 "
        "load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply "
        "parameter_alignment pipeline_loading_checkpoint reduce_scatter round_robin_gradients "
        "save_muon_momentum_buffer_in_memory stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save stage3_use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce "
        "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights",
        "a whole number, 0 or more": "stage stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size "
        "stage3_module_granularity_threshold",
        "a positive whole number": "sub_group_size zero_hpz_partition_size",
        "a whole number from 1 to 10000000000": "reduce_bucket_size",
        "an even whole number from 2 to 10000000000": "allgather_bucket_size",
        "an object, {...}": "offload_param offload_optimizer zenflow leaf_module",
    },
    "zero_optimization.offload_param": {
        "true or false": "pin_memory",
        "a positive whole number": "buffer_count",
        "a whole number, 0 or more": "max_in_cpu",
        "a whole number from 1 to 10000000000": "buffer_size",
        "text": "device nvme_path",
    },
    "zero_optimization.offload_optimizer": {
        "true or false": "pin_memory pipeline_read pipeline_write fast_init super_offload",
        "a positive whole number": "buffer_count",
        "a number from 0 to 1": "ratio cpuadam_cores_perc",
        "text": "device nvme_path",
    },
    "fp16": {
        "true or false": "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        "a number, 0 or more": "loss_scale min_loss_scale",
        "a whole number, 0 or more": "initial_scale_power",
        "a positive whole number": "loss_scale_window hysteresis",
    },
    "bf16": {"true or false": "enabled bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow "
                              "immediate_grad_update"},
    "activation_checkpointing": {
        "true or false": "partition_activations contiguous_memory_optimization cpu_checkpointing profile "
        "synchronize_checkpoint_boundary",
        "a positive integer": "number_checkpoints",
    },
    "optimizer": {"true or false": "legacy_fusion", "an object, {...}": "params"},
    "optimizer.params": {
        "a number from 0 to 1": "lr muon_lr adam_lr momentum",
        "two numbers from 0 to below 1, such as [0.9, 0.999]": "betas",
        "a number, 0 or more": "eps weight_decay max_coeff min_coeff",
        "true or false": "torch_adam adam_w_mode bias_correction amsgrad fp32_optimizer_states foreach",
    },
    "scheduler": {"an object, {...}": "params"},
    "scheduler.params": {
        "a number from 0 to 1": "warmup_min_lr warmup_max_lr cycle_min_lr cycle_max_lr lr_range_test_min_lr warmup_min_ratio "
        "cos_min_ratio cycle_min_mom cycle_max_mom",
        "a positive integer": "warmup_num_steps total_num_steps lr_range_test_step_size cycle_first_step_size "
        "cycle_second_step_size",
        "a whole number, 0 or more": "cycle_first_stair_count cycle_second_stair_count decay_step_size",
        "a number, 0 or more": "decay_lr_rate decay_mom_rate",
        "a positive number": "lr_range_test_step_rate",
        "a whole number": "last_batch_iteration",
        "true or false": "cycle_momentum lr_range_test_staircase",
        "log or linear": "warmup_type",
    },
    "aio": {"a positive integer": "block_size queue_depth intra_op_parallelism",
            "true or false": "single_submit overlap_events use_gds"},
    "checkpoint": {"WARN, IGNORE or FAIL": "tag_validation",
                   "true or false": "load_universal use_node_local_storage checkpoint_serialization",
                   "an object, {...}": "parallel_write writer"},
    "data_types": {"fp32, fp16 or bf16": "grad_accum_dtype param_dtype buffer_dtype", "a list": "keep_in_fp32_modules"},
    "torch_autocast": {"true or false": "enabled", "fp32, fp16 or bf16": "dtype",
                       "a list": "lower_precision_safe_modules"},
    "flops_profiler": {"true or false": "enabled detailed", "a positive integer": "profile_step top_modules",
                       "a number, 0 or more": "recompute_fwd_factor", "a whole number": "module_depth", "text": "output_file"},
    "timers": {"an object, {...}": "throughput"},
}  # fmt: skip
"""Section -> what to write -> the keys that it is written for. Source: deepspeed 0.19.8 and its schedules' own code.

A bucket is allocated at once: 10^10 numbers are 40 GB in float32.
"""
REQUIRED = {"WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",),
            "OneCycle": ("cycle_min_lr", "cycle_max_lr")}  # fmt: skip
"""Settings that a schedule has no default for."""


def value_problems(where: str | Path, ds: dict[str, Any]) -> list[str]:
    """A problem for every known key, at the top and in the sections, whose value is of another kind; "auto" is none."""
    found = []
    for section, kinds in VALUES.items():
        given = {key: value for key, value in inner(ds, section).items() if value != "auto"}
        found += kind_problems(where, given, kinds, f"{section}." if section else "")
    return found


def inner(ds: dict[str, Any], section: str) -> dict[str, Any]:
    """A section by its dotted name; empty if there is none, or no object."""
    for part in filter(None, section.split(".")):
        ds = ds[part] if isinstance(ds.get(part), dict) else {}
    return ds
