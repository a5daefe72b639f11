"""DeepSpeed JSONs in the forms in which trainers publish them, written for these tests; none is a copy."""

from typing import Any, NamedTuple

Json = dict[str, Any]


class Form(NamedTuple):
    """A JSON, and what must come of it."""

    ds: Json
    engine: str = ""
    """Stage, precision, devices of optimizer and parameters of the engine, where it is accepted."""
    cure: str = ""
    """Part of the message that refuses it."""


def auto(*keys: str) -> Json:
    return dict.fromkeys(keys, "auto")


BATCH = auto("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ALL = BATCH | {"gradient_clipping": "auto"}
SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
FP16, BF16 = {"fp16": {"enabled": "auto"} | SCALE}, {"bf16": {"enabled": "auto"}}
BOTH = FP16 | BF16
ADAMW = {"type": "AdamW", "params": auto("lr", "betas", "eps", "weight_decay")}
WARMUP = auto("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
CPU = {"device": "cpu", "pin_memory": True}
ONE = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
TWO = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
ALIASES = ("max_live_parameters", "max_reuse_distance")
AUTO_BUCKETS = auto("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
THREE = AUTO_BUCKETS | {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
NVME = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 4}
PARAMETERS_ON_NVME = NVME | {"buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
PRINTS = {"steps_per_print": 2000, "wall_clock_breakdown": False}
TINY = ONE | {"bf16": {"enabled": True}}


def zero(stage: Json | int | str, **more: Any) -> Json:
    """The section of a stage, with further keys."""
    return {"zero_optimization": (stage if isinstance(stage, dict) else {"stage": stage}) | more}


def adamw(**params: Any) -> Json:
    return {"optimizer": {"type": "AdamW", "params": params}}


def schedule(kind: str, **params: Any) -> Json:
    return {"scheduler": {"type": kind, "params": params}}


ACCEPTED: dict[str, Form] = {
    # of language-model trainers: all by flags
    "0, both auto": Form(
        ALL | BOTH | zero(TWO | {"stage": 0}, round_robin_gradients=True), "0 bfloat16 none none"
    ),
    "1, both auto": Form(ALL | BOTH | zero(1), "1 bfloat16 none none"),
    "2, both auto, untested": Form(
        ALL | BOTH | zero(TWO, round_robin_gradients=True) | {"zero_allow_untested_optimizer": True},
        "2 bfloat16 none none",
    ),
    "2, offloaded": Form(ALL | BOTH | zero(TWO, offload_optimizer=CPU), "2 bfloat16 cpu none"),
    "3, both auto": Form(ALL | BOTH | zero(THREE), "3 bfloat16 none none"),
    "3, offloaded": Form(
        ALL | BOTH | zero(THREE, offload_optimizer=CPU, offload_param=CPU), "3 bfloat16 cpu cpu"
    ),
    "2, optimizer and WarmupLR": Form(
        ALL | FP16 | {"optimizer": ADAMW} | schedule("WarmupLR", **WARMUP) | zero(TWO) | PRINTS,
        "2 bfloat16 none none",
    ),
    "3, WarmupDecayLR": Form(
        ALL
        | BF16
        | {"optimizer": ADAMW}
        | schedule("WarmupDecayLR", **WARMUP, total_num_steps="auto")
        | zero(THREE, offload_optimizer=CPU, offload_param=CPU),
        "3 bfloat16 cpu cpu",
    ),
    "3 on NVMe": Form(
        ALL
        | BF16
        | {"optimizer": ADAMW}
        | schedule("WarmupLR", **WARMUP)
        | zero(THREE, offload_optimizer=NVME, offload_param=PARAMETERS_ON_NVME)
        | {"aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False}},
        "3 bfloat16 nvme nvme",
    ),
    "2, fast_init": Form(
        ALL | BF16 | zero(TWO, offload_optimizer=CPU | {"fast_init": False, "pipeline_read": False}),
        "2 bfloat16 cpu none",
    ),
    "2, torch_adam": Form(
        BATCH | BF16 | adamw(**ADAMW["params"], torch_adam=True, adam_w_mode=True) | zero(TWO),
        "2 bfloat16 none none",
    ),
    "2, Adam": Form(ALL | BOTH | {"optimizer": ADAMW | {"type": "Adam"}} | zero(2), "2 bfloat16 none none"),
    "bf16 and no fp16": Form(
        ALL | {"bf16": {"enabled": True}, "fp16": {"enabled": False}} | zero(THREE), "3 bfloat16 none none"
    ),
    "bf16 auto beside fp16": Form(
        ALL | BF16 | {"fp16": {"enabled": True} | SCALE} | zero(2), "2 float16 none none"
    ),
    "fp16 with auto_cast": Form(
        ALL | {"fp16": {"enabled": True, "auto_cast": False} | SCALE} | zero(TWO), "2 float16 none none"
    ),
    "float32": Form(
        ALL | {"fp16": {"enabled": False}, "bf16": {"enabled": False}} | zero(2), "2 float32 none none"
    ),
    # by the names of the fields, and old ones
    "3, sub_group_size 0": Form(ALL | BF16 | zero(THREE, sub_group_size=0), "3 bfloat16 none none"),
    "3, names of fields": Form(
        ALL
        | BOTH
        | zero(
            3,
            sub_group_size=1e9,
            **dict.fromkeys(ALIASES, 1e9),
            prefetch_bucket_size=5e7,
            param_persistence_threshold=1e5,
            gather_16bit_weights_on_model_save=True,
        ),
        "3 bfloat16 none none",
    ),
    "3, gather fp16": Form(
        ALL | BF16 | zero(3, stage3_gather_fp16_weights_on_model_save=True), "3 bfloat16 none none"
    ),
    "cpu_offload": Form(ALL | FP16 | zero(TWO, cpu_offload=True), "2 bfloat16 cpu none"),
    "cpu_offload off": Form(ALL | FP16 | zero(TWO, cpu_offload=False), "2 bfloat16 none none"),
    "3, both old offloads": Form(
        ALL | BF16 | zero(3, cpu_offload=True, cpu_offload_param=True, cpu_offload_use_pin_memory=True),
        "3 bfloat16 cpu cpu",
    ),
    "bfloat16": Form(ALL | {"bfloat16": {"enabled": True}} | zero(TWO), "2 bfloat16 none none"),
    "auto in every bucket": Form(
        ALL | BOTH | zero(2, overlap_comm="auto", allgather_bucket_size="auto", reduce_bucket_size="auto"),
        "2 bfloat16 none none",
    ),
    "3, auto in every key": Form(
        ALL | BOTH | zero(THREE | dict.fromkeys(set(THREE) - {"stage", "overlap_comm"}, "auto")),
        "3 bfloat16 none none",
    ),
    # of accelerate, and of trainers of pictures and videos
    "all by accelerate": Form(
        ALL
        | BOTH
        | zero(
            auto("stage", "stage3_gather_16bit_weights_on_model_save"),
            offload_optimizer=auto("device", "nvme_path"),
            offload_param=auto("device"),
        )
        | {"steps_per_print": "auto"},
        "2 bfloat16 none none",
    ),
    "null for a path": Form(
        ALL
        | zero(
            3,
            offload_optimizer={"device": "cpu", "nvme_path": None},
            offload_param={"device": "none", "nvme_path": None},
        )
        | BF16,
        "3 bfloat16 cpu none",
    ),
    "clipping by accelerate": Form(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        | BF16
        | zero(2),
        "2 bfloat16 none none",
    ),
    "steps_per_print 1e5": Form(ALL | BF16 | zero(2) | {"steps_per_print": 1e5}, "2 bfloat16 none none"),
    "remarks": Form(
        {"_comment": "for 8 GPUs", "//": "see the wiki", "comment": ["a", "b"]}
        | ALL
        | BF16
        | zero(TWO, _note="2e8 on small cards", offload_optimizer=CPU | {"#": 1}),
        "2 bfloat16 cpu none",
    ),
    "inline, one line": Form(TINY | {"gradient_clipping": 1.0, "steps_per_print": 1}, "1 bfloat16 none none"),
    "2, low bandwidth": Form(
        TINY
        | zero(TWO, allgather_bucket_size=2e8, reduce_bucket_size=2e8)
        | {"communication_data_type": "fp32"},
        "2 bfloat16 none none",
    ),
    "2, fp32 sums": Form(
        TINY | zero(2) | {"data_types": {"grad_accum_dtype": "fp32"}}, "2 bfloat16 none none"
    ),
    "recomputed": Form(
        TINY
        | zero(2)
        | {
            "activation_checkpointing": {
                "partition_activations": False,
                "contiguous_memory_optimization": False,
                "cpu_checkpointing": False,
                "number_checkpoints": None,
                "profile": False,
            }
        },
        "2 bfloat16 none none",
    ),
    "profiled": Form(
        TINY
        | zero(2)
        | {
            "flops_profiler": {
                "enabled": False,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 1,
                "detailed": True,
                "output_file": None,
            },
            "wall_clock_breakdown": True,
        },
        "2 bfloat16 none none",
    ),
    "monitors off": Form(
        TINY
        | zero(2)
        | {
            "tensorboard": {"enabled": False, "output_path": "", "job_name": ""},
            "wandb": {"enabled": False, "team": None, "group": None, "project": "clips"},
            "csv_monitor": {"enabled": False, "output_path": "logs"},
            "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
        },
        "2 bfloat16 none none",
    ),
    "sections switched off": Form(
        TINY
        | zero(2, zero_quantized_weights=False, zero_hpz_partition_size=1, zero_quantized_gradients=False)
        | {
            name: {"enabled": False}
            for name in (
                "amp",
                "hybrid_engine",
                "curriculum_learning",
                "elasticity",
                "autotuning",
                "eigenvalue",
            )
        }
        | {"prescale_gradients": False, "sparse_gradients": False, "gradient_predivide_factor": 1.0},
        "2 bfloat16 none none",
    ),
    "amp by flags": Form(
        ALL | FP16 | zero(2) | {"amp": auto("enabled", "opt_level")}, "2 bfloat16 none none"
    ),
    "compile switched off": Form(
        TINY | zero(2) | {"compile": {"enabled": False, "backend": "inductor"}}, "2 bfloat16 none none"
    ),
    "torch's own Adam when offloaded": Form(
        ALL | BF16 | zero(2, offload_optimizer=CPU) | {"zero_force_ds_cpu_optimizer": False},
        "2 bfloat16 cpu none",
    ),
    "3, partly offloaded": Form(
        TINY | zero(3, offload_optimizer=CPU | {"ratio": 0.3}), "3 bfloat16 cpu none"
    ),
    "3, lean": Form(
        TINY
        | adamw(lr=1e-5, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
        | zero(3, memory_efficient_linear=False, round_robin_gradients=False, ignore_unused_parameters=True),
        "3 bfloat16 none none",
    ),
    "own rate": Form(
        ONE
        | {"bf16": {"enabled": True}, "gradient_clipping": 1}
        | adamw(lr=2e-5, betas=[0.9, 0.999], eps=1e-8, weight_decay=3e-7)
        | schedule("WarmupLR", warmup_min_lr=0, warmup_max_lr=2e-5, warmup_num_steps=1e3)
        | zero(TWO),
        "2 bfloat16 none none",
    ),
    "cosine": Form(
        BATCH
        | BF16
        | {"optimizer": ADAMW}
        | schedule("WarmupCosineLR", total_num_steps="auto", warmup_num_steps="auto", cos_min_ratio=0.1)
        | zero(2),
        "2 bfloat16 none none",
    ),
    "a schedule without an optimizer": Form(
        TINY | schedule("WarmupLR", warmup_max_lr=3e-5, warmup_num_steps=100, warmup_type="linear") | zero(2),
        "2 bfloat16 none none",
    ),
    "Lion": Form(
        TINY | {"optimizer": {"type": "Lion", "params": {"lr": 1e-5}}} | zero(2), "2 bfloat16 none none"
    ),
    "checkpoints on each node": Form(
        TINY | zero(1) | {"checkpoint": {"use_node_local_storage": True, "tag_validation": "Warn"}},
        "1 bfloat16 none none",
    ),
}
REFUSED: dict[str, Form] = {
    # it would change what is learned, DeepSpeed 0.19 has removed it, or has no such thing for this network
    "prescaled": Form(TINY | zero(2) | {"prescale_gradients": True}, cure="prescale_gradients` is true"),
    "ZeRO++": Form(TINY | zero(3, zero_quantized_weights=True), cure="zero_quantized_weights` is true"),
    "hybrid engine": Form(
        TINY | zero(2) | {"hybrid_engine": {"enabled": True, "max_out_tokens": 512}},
        cure="`hybrid_engine` is",
    ),
    "Apex": Form(
        ONE | zero(2) | {"amp": {"enabled": True, "opt_level": "O1"}}, cure='Write "bf16": {"enabled": true}'
    ),
    "pipeline": Form(TINY | {"pipeline": {"stages": "auto", "partition": "best"}}, cure="`pipeline` is"),
    "autotuning": Form(TINY | zero(2) | {"autotuning": {"enabled": True}}, cure='"deepspeed_config": "auto"'),
    "DeepCompile": Form(
        TINY | zero(3) | {"compile": {"deepcompile": True}},
        cure='"wandistiller": {"compile": true} in its place',
    ),
    "1-bit Adam": Form(
        TINY | {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4}}}, cure="Write one of: Adam, AdamW"
    ),
    "no warm-up": Form(
        TINY | adamw(lr=1e-4) | schedule("WarmupLR", warmup_num_steps=0), cure="warmup_num_steps` is 0"
    ),
    "parameters offloaded at stage 2": Form(
        TINY | zero(2, offload_param=CPU), cure="It has no effect at stage 2. Remove it, or write stage 3."
    ),
    "no batch": Form(zero(2) | BF16, cure='--batch_size, or "batch_size" in the recipe'),
}
