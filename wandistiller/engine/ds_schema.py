"""Keys and types of a DeepSpeed JSON: DeepSpeed's own models where it has them, else tables.

DeepSpeed 0.19.8 ignores unknown keys of the tabled sections in silence, and takes most values as they are.
"""

import inspect
import typing
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from pydantic import BaseModel, BeforeValidator, Field
from pydantic.fields import FieldInfo

from wandistiller.utils.validation import (
    Count,
    NotNegative,
    Positive,
    Section,
    Share,
    Text,
    of_type,
    write,
)

BLOCK = "wandistiller"
"""Key of this package's own settings in a DeepSpeed JSON."""
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OPTIMIZERS = ("Adam", "AdamW")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
PEAKS = {"warmuplr": "warmup_max_lr", "warmupdecaylr": "warmup_max_lr"}
"""Schedules, in lower case, that replace the optimizer's learning rate -> their key for it."""
WHOLE = BeforeValidator(
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)
"""Takes 5e8 for an integer, as DeepSpeed's models do."""
Betas = Annotated[
    list[Annotated[float, Field(ge=0, lt=1)]],
    Field(min_length=2, max_length=2),
    write("two numbers from 0 to below 1, such as [0.9, 0.999]"),
]
TagValidation = Annotated[str, Field(pattern="^(?i:warn|ignore|fail)$"), write("WARN, IGNORE or FAIL")]
MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": DeepSpeedFP16Config,
    "bf16": DeepSpeedBF16Config,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
}
RENAMED = {
    key: renamed
    for model in MODELS.values()
    for key, field in model.model_fields.items()
    if (renamed := (field.json_schema_extra or {}).get("new_param"))
}
"""Old keys -> those that replace them, which DeepSpeed 0.19.8 sets where no plan sees it."""
TABLES: dict[str, dict[str, Any]] = {
    "": of_type(
        (Any, " ".join(BATCH_KEYS)),  # solved and checked by `batch_size`
        (
            bool,
            "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown "
            "dump_state disable_allgather prescale_gradients dataloader_drop_last disable_python_gc "
            "use_data_before_expert_parallelism",
        ),
        (NotNegative, "gradient_clipping"),
        (Positive, "gradient_predivide_factor"),
        (Count, "steps_per_print"),
        (Text, "communication_data_type seq_parallel_communication_data_type"),
        (Literal["debug", "info", "warning", "error", "critical"], "log_level"),
        (
            Section,
            "optimizer scheduler fp16 bf16 zero_optimization activation_checkpointing aio checkpoint "
            "comms_logger tensorboard wandb csv_monitor comet timers",
        ),
    ),
    "activation_checkpointing": of_type(
        (
            bool,
            "partition_activations contiguous_memory_optimization cpu_checkpointing profile "
            "synchronize_checkpoint_boundary",
        ),
        (Count, "number_checkpoints"),
    ),
    "optimizer": of_type((Any, "type"), (Section, "params")),
    "scheduler": of_type((Any, "type"), (Section, "params")),
    "aio": of_type(
        (Count, "block_size queue_depth intra_op_parallelism"), (bool, "single_submit overlap_events use_gds")
    ),
    "checkpoint": of_type(
        (TagValidation, "tag_validation"),
        (Section, "parallel_write"),
        (bool, "load_universal use_node_local_storage checkpoint_serialization"),
    ),
    "timers": of_type((Section, "throughput")),
}
PARAMS: dict[str, dict[str, Any]] = {
    "optimizer.params": of_type(
        (Share, "lr"),
        (Betas, "betas"),
        (NotNegative, "eps weight_decay"),
        (bool, "torch_adam adam_w_mode fused"),
    ),
    "scheduler.params": of_type(
        (Share, "warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio"),
        (Count, "warmup_num_steps total_num_steps"),
        (int, "last_batch_iteration"),
        (Literal["log", "linear"], "warmup_type"),
    ),
}
"""Types of the settings of optimizers and of all schedules; `params_of` says which of them one has."""


@cache
def section_types() -> dict[str, dict[str, Any]]:
    """The types of all sections, by dotted name; "" is the top."""
    return TABLES | {
        name: {
            field.alias or key: _strict(field)
            for key, field in model.model_fields.items()
            if key not in RENAMED
        }
        for name, model in MODELS.items()
    }


def _strict(field: FieldInfo) -> Any:
    """The type that JSON has for a field of DeepSpeed's: never null, an object for a section."""
    kind = next((k for k in typing.get_args(field.annotation) if k is not type(None)), field.annotation)
    if issubclass(kind, BaseModel):
        return Section
    if issubclass(kind, Enum):
        values = [member.value for member in kind]
        if all(isinstance(value, str) for value in values):
            return Literal[tuple(values)]
        return Annotated[
            int, Field(ge=min(values), le=max(values)), WHOLE, write(f"one of: {', '.join(map(str, values))}")
        ]
    if issubclass(kind, Path):
        return Text
    return Annotated[(kind, *field.metadata, WHOLE)]


@cache
def params_of(kind: str) -> dict[str, bool]:
    """The settings of a schedule or an optimizer, and whether each is required."""
    if kind in SCHEDULERS:
        _, *settings = inspect.signature(getattr(lr_schedules, kind)).parameters.values()
        return {p.name: p.default is p.empty for p in settings}
    return dict.fromkeys(PARAMS["optimizer.params"], False)
