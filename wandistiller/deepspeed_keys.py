"""The keys of a DeepSpeed JSON, as tables; tests/test_deepspeed_json.py compares them with DeepSpeed itself."""

# Keys that DeepSpeed 0.19.8 reads; tests/test_deepspeed_json.py compares the sections with DeepSpeed's own classes.
TOP_KEYS = set(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "optimizer scheduler fp16 bf16 torch_autocast zero_optimization zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer gradient_clipping activation_checkpointing aio steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state disable_allgather communication_data_type seq_parallel_communication_data_type "
    "prescale_gradients gradient_predivide_factor gradient_allreduce_op checkpoint data_types dataloader_drop_last "
    "flops_profiler comms_logger tensorboard wandb csv_monitor comet compile data_efficiency eigenvalue "
    "disable_python_gc log_level use_data_before_expert_parallelism timers".split()
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
    "aio": set("block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds".split()),
    "checkpoint": set(
        "tag_validation load_universal use_node_local_storage parallel_write checkpoint_serialization writer".split()
    ),
    "data_types": {"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"},
    "torch_autocast": {"enabled", "dtype", "lower_precision_safe_modules"},
    "flops_profiler": set(
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file".split()
    ),
    "timers": {"throughput"},
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
}
OPTIMIZER_KEYS = {"lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "bias_correction", "amsgrad",
                  "fp32_optimizer_states", "foreach"}  # fmt: skip
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon")
_WARMUP = {"warmup_num_steps", "warmup_type", "last_batch_iteration"}
_WARMUP_LR = _WARMUP | {"warmup_min_lr", "warmup_max_lr"}
SCHEDULER_KEYS = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": _WARMUP_LR | {"total_num_steps"},
    "WarmupCosineLR": _WARMUP | {"total_num_steps", "warmup_min_ratio", "cos_min_ratio"},
    "LRRangeTest": set("lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
                       "last_batch_iteration".split()),
    "OneCycle": set(
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate "
        "last_batch_iteration".split()
    ),
}  # fmt: skip
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
