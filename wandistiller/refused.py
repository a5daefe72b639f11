"""What a student's DeepSpeed JSON may not ask for: it is known not to work on Wan, or changes what is learned."""

from pydoc import locate
from typing import Any

from wandistiller.deepspeed_values import inner
from wandistiller.problems import problem

# Tried with deepspeed 0.19.8: key -> why it is refused, and what to write instead.
ZERO = {
    "memory_efficient_linear": "It replaces torch's linear for the whole process, the teacher's too, and changes bf16 numbers. "
                               "Write false.",
    "zero_quantized_weights": "The gathered weights would be rounded to 8 bits, and the loss curve be another. Remove it.",
    "zero_quantized_gradients": "The gradients would be rounded to 4 bits, and the loss curve be another. Remove it.",
    "zero_quantized_nontrainable_weights": "The frozen weights would be rounded to 8 bits, and the loss curve be another. "
                                           "Remove it.",
    "legacy_stage1": "DeepSpeed has removed it. Remove it.",
    "zenflow": "ZenFlow steps part of the weights late, and the loss curve would be another. Remove it.",
    "stage3_module_granularity_threshold": "Blocks fetched as a whole leave some of Wan's parameters ungathered, and the "
                                           "forward pass stops. Remove it.",
}  # fmt: skip
TOP = {
    "gradient_predivide_factor": "DeepSpeed does not support it with ZeRO's reduce_scatter. Remove it.",
    "prescale_gradients": "DeepSpeed does not support it with ZeRO's reduce_scatter. Remove it.",
    "data_efficiency": "The data's order is this package's own, so that a run can go on from any step. Remove it.",
    "eigenvalue": "DeepSpeed has removed it. Remove it.",
}


def student_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """A problem for each setting that is refused, with the reason."""
    zero = ds.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return []  # said already
    found = [problem(where, f"zero_optimization.{k}", zero[k], why) for k, why in ZERO.items()
             if _is_on(zero.get(k)) or zero.get(k) == {}]  # fmt: skip
    found += [problem(where, key, value, why) for so, key, value, why in _pairs(ds) if so]
    found += [problem(where, k, ds[k], why) for k, why in TOP.items() if _is_on(ds.get(k), default=1.0)]
    offload = zero.get("offload_optimizer")
    if isinstance(offload, dict) and offload.get("super_offload"):
        found.append(problem(where, "zero_optimization.offload_optimizer.super_offload", True,
                             "It needs an NVIDIA GPU and was never tried here. Plain CPU offload serves. "
                             "Remove it."))  # fmt: skip
    stage_1 = zero.get("stage", 1) == 1 and not (isinstance(offload, dict) and offload.get("device", "none") != "none")
    types, bf16 = ds.get("data_types"), ds.get("bf16")
    if stage_1 and isinstance(types, dict) and types.get("grad_accum_dtype") == "fp32" and isinstance(bf16, dict) and bf16.get(
            "enabled"):  # fmt: skip
        found.append(problem(where, "data_types.grad_accum_dtype", "fp32", "At stage 1 in bf16 DeepSpeed takes another optimizer "
                             "for it, whose checkpoints cannot be read again. Write stage 2, or remove it."))  # fmt: skip
    if inner(ds, "comet").get("api_key"):  # which would be written to OUTPUT/resolved
        found.append(f"{where}: `comet.api_key` is a secret. Remove it, and set COMET_API_KEY in the environment.")
    compiled = ds.get("compile")
    if isinstance(compiled, dict) and compiled.get("deepcompile"):
        found.append(problem(where, "compile.deepcompile", True, "It was never tried with the teacher's engine beside it. "
                             "Remove it."))  # fmt: skip
    return found


def _pairs(ds: dict[str, Any]) -> list[tuple[bool, str, Any, str]]:
    """(whether it is so, key, value, reason) of what deepspeed 0.19.8's engine stops at beside other settings, or alone."""
    zero, params, bf16, fp16 = (inner(ds, section) for section in ("zero_optimization", "optimizer.params", "bf16", "fp16"))
    types, writer = inner(ds, "data_types"), inner(ds, "checkpoint").get("writer")
    offloaded = inner(zero, "offload_optimizer").get("device", "none") != "none"
    dtype = "bf16" if bf16.get("enabled") else "fp16" if fp16.get("enabled") else "fp32"
    kept = inner(ds, "torch_autocast").get("lower_precision_safe_modules")
    unknown = [name for name in kept if not (isinstance(name, str) and locate(name))] if isinstance(kept, list) else []
    fused = str(inner(ds, "optimizer").get("type")).lower() in ("adam", "adamw") and params.get("torch_adam") is not True
    masters = "It needs `zero_optimization.offload_optimizer`. Write that section, or remove it."
    return [
        (zero.get("compute_grad_norm") is False and ds.get("gradient_clipping", 1) != 0, "zero_optimization.compute_grad_norm",
         False, "Without the norm nothing can be clipped. Write `gradient_clipping`: 0, or remove it."),
        *((inner(ds, half).get(key) is True and not offloaded, f"{half}.{key}", True, masters)
          for half, key in (("bf16", "bf16_master_weights_and_grads"), ("fp16", "fp16_master_weights_and_grads"))),
        (writer is not None, "checkpoint.writer", writer, "DeepSpeed's other writers fail here. Remove it."),
        (types.get("param_dtype") not in (None, dtype), "data_types.param_dtype", types.get("param_dtype"),
         f"The sections bf16 and fp16 say {dtype}. Remove it."),
        (fused and params.get("amsgrad") is True and not offloaded, "optimizer.params.amsgrad", True,
         "DeepSpeed's FusedAdam has none. Write `torch_adam`: true, or remove it."),
        (fused and "foreach" in params, "optimizer.params.foreach", params.get("foreach"),
         "Only torch's own Adam has it. Write `torch_adam`: true, or remove it."),
        (bool(unknown), "torch_autocast.lower_precision_safe_modules", unknown,
         "Write classes that can be imported, such as torch.nn.modules.linear.Linear."),
    ]  # fmt: skip


def _is_on(value: Any, default: float = 0.0) -> bool:
    """Whether a setting asks for something: true, a section that is enabled, or a number other than the default."""
    if isinstance(value, dict):
        return bool(value.get("enabled", True)) and bool(value)
    return value is True or (type(value) in (int, float) and value not in (0, default))
