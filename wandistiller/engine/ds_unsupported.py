"""Settings refused in a student's DeepSpeed JSON: they do not work on Wan, or change the loss curve."""

from collections.abc import Callable
from pydoc import locate
from typing import Any

from wandistiller.engine.ds_json import SHORT, DeepSpeedJson
from wandistiller.engine.ds_schema import ADAM

REFUSED = (
    *("gradient_predivide_factor", "prescale_gradients", "optimizer.legacy_fusion", "checkpoint.writer"),
    "zero_optimization.offload_optimizer.super_offload",
    *(
        f"zero_optimization.zero_quantized_{what}"
        for what in ("weights", "gradients", "nontrainable_weights")
    ),
    *(f"zero_optimization.{key}" for key in ("memory_efficient_linear", "legacy_stage1", "zenflow")),
    "zero_optimization.stage3_module_granularity_threshold",
)
"""Settings that round or delay updates, fail here, or are gone (deepspeed 0.19.8)."""
NOT_OFFERED = (
    *("amp", "hybrid_engine", "curriculum_learning", "progressive_layer_drop", "sparse_attention"),
    *("sparse_gradients", "pipeline", "tensor_parallel", "expert_parallel", "sequence_parallel_size"),
    *("compression_training", "quantize_training", "weight_quantization", "graph_harvesting", "autotuning"),
    *("elasticity", "nebula", "datastates_ckpt", "compile", "data_efficiency", "eigenvalue"),
)
"""Sections of DeepSpeed that fit neither a frozen teacher nor this student, or that it has removed."""
INSTEAD = "It does not go with these engines. Remove it; ds_configs/README.md has what there is."


class _Engine:
    """The settings of a student's DeepSpeed JSON that rules are about."""

    def __init__(self, json: DeepSpeedJson):
        self.stage = json.section("zero_optimization").get("stage", 1)
        enabled = [name for name in ("bf16", "fp16") if json.section(name).get("enabled")]
        self.dtype = [*enabled, "fp32"][0]
        self.offloaded = json.optimizer_on != "none"
        self.optimizer, torchs = json.optimizer, json.section("optimizer.params").get("torch_adam") is True
        is_adam = json.optimizer in ADAM
        self.fused, self.torch_adam = is_adam and not torchs, is_adam and torchs
        self.clips = json.raw.get("gradient_clipping", 1) != 0


MASTERS = "It needs `zero_optimization.offload_optimizer`. Write that section, or remove it."
# Tried with deepspeed 0.19.8: key -> (whether its value is refused, why)
RULES: dict[str, tuple[Callable[[Any, _Engine], bool], str]] = {
    "managed_gradient_accumulation": (
        lambda value, e: value is False,
        "Every micro-step would change the weights. Write true, or remove it.",
    ),
    "gradient_allreduce_op": (
        lambda value, e: str(value).lower() == "sum",
        'The loss curve would depend on the number of ranks. Write "mean", or remove it.',
    ),
    "zero_optimization.compute_grad_norm": (
        lambda value, e: value is False and e.clips,
        "Without the norm nothing can be clipped. Write `gradient_clipping`: 0, or remove it.",
    ),
    "bf16.bf16_master_weights_and_grads": (lambda value, e: value is True and not e.offloaded, MASTERS),
    "fp16.enabled": (  # its pull request 8393
        lambda value, e: value is True and e.stage == 0,
        "At stage 0 DeepSpeed does not scale the loss, and hardly anything is learned. Write `stage`: 1, or "
        "bf16.",
    ),
    "fp16.fp16_master_weights_and_grads": (lambda value, e: value is True and not e.offloaded, MASTERS),
    "data_types.grad_accum_dtype": (  # at stage 1 its other optimizer has checkpoints that cannot be read
        lambda value, e: (
            value is not None
            and SHORT.get(str(value), value) != e.dtype
            and (e.stage == 0 or (e.stage == 1 and e.dtype == "bf16" and not e.offloaded))
        ),
        "DeepSpeed has no other precision for sums at this stage. Write stage 2, or remove it.",
    ),
    "data_types.param_dtype": (
        lambda value, e: SHORT.get(str(value), value) not in (None, e.dtype),
        "The sections bf16 and fp16 ask for another. Remove it.",
    ),
    "optimizer.params.amsgrad": (
        lambda value, e: value is True and e.fused,
        "DeepSpeed's own Adam has none. Write `torch_adam`: true, or remove it.",
    ),
    "optimizer.type": (
        lambda value, e: e.optimizer == "lamb" and e.stage != 0,
        "ZeRO would show Lamb a rank's part of all weights as one. Write `stage`: 0, or AdamW.",
    ),
    "zero_optimization.reduce_scatter": (
        lambda value, e: value is not False and e.optimizer == "muon" and e.stage == 3,
        "DeepSpeed has Muon at stage 3 without it alone. Write false, or `stage`: 2.",
    ),
    "optimizer.params.fp32_optimizer_states": (
        lambda value, e: value is not None and e.optimizer in ("adagrad", "lion") and not e.offloaded,
        "It is of optimizers in CPU memory. Remove it.",
    ),
    "optimizer.params.bias_correction": (
        lambda value, e: value is not None and e.torch_adam,
        "torch's Adam has no such setting: it always corrects. Remove it, or `torch_adam`.",
    ),
    "optimizer.params.foreach": (
        lambda value, e: value is not None and e.fused,
        "Only torch's own Adam has it. Write `torch_adam`: true, or remove it.",
    ),
    "torch_autocast.lower_precision_safe_modules": (
        lambda value, e: isinstance(value, list) and not all(isinstance(v, str) and locate(v) for v in value),
        "Write classes that can be imported, such as torch.nn.modules.linear.Linear.",
    ),
}


def student_problems(json: DeepSpeedJson) -> list[str]:
    """List the settings that are refused, with the reason."""
    problems, engine = [], _Engine(json)
    for path in REFUSED:
        section, _, key = path.rpartition(".")
        if is_on(value := json.section(section).get(key), default=1.0) or value == {}:
            problems.append(json.problem(path, value, INSTEAD))
    for path, (refused, why) in RULES.items():
        section, _, key = path.rpartition(".")
        if refused(value := json.section(section).get(key), engine):
            problems.append(json.problem(path, value, why))
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
