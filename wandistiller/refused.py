"""What a student's DeepSpeed JSON may not ask for: it is known not to work on Wan, or changes what is learned."""

from typing import Any

from wandistiller.config import problem

# Tried with deepspeed 0.19.8: key -> why it is refused, and what to write instead.
ZERO = {
    "memory_efficient_linear": "It replaces torch's linear for the whole process, the teacher's too, and changes bf16 numbers. "
                               "Write false.",
    "zero_quantized_weights": "The gathered weights would be rounded to 8 bits, and the loss curve be another. Remove it.",
    "zero_quantized_gradients": "The gradients would be rounded to 4 bits, and the loss curve be another. Remove it.",
    "zenflow": "ZenFlow steps part of the weights late, and the loss curve would be another. Remove it.",
    "stage3_module_granularity_threshold": "Blocks fetched as a whole leave some of Wan's parameters ungathered, and the "
                                           "forward pass stops. Remove it.",
}  # fmt: skip
TOP = {
    "gradient_predivide_factor": "DeepSpeed does not support it with ZeRO's reduce_scatter. Remove it.",
    "data_efficiency": "The data's order is this package's own, so that a run can go on from any step. Remove it.",
    "eigenvalue": "DeepSpeed has removed it. Remove it.",
}


def student_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """A problem for each setting that is refused, with the reason."""
    zero = ds.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return []  # said already
    found = [problem(where, f"zero_optimization.{k}", zero[k], why) for k, why in ZERO.items() if _is_on(zero.get(k))]
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
    compiled = ds.get("compile")
    if isinstance(compiled, dict) and compiled.get("deepcompile"):
        found.append(problem(where, "compile.deepcompile", True, "It was never tried with the teacher's engine beside it. "
                             "Remove it."))  # fmt: skip
    return found


def _is_on(value: Any, default: float = 0.0) -> bool:
    """Whether a setting asks for something: true, a section that is enabled, or a number other than the default."""
    if isinstance(value, dict):
        return bool(value.get("enabled", True)) and bool(value)
    return value is True or (type(value) in (int, float) and value not in (0, default))
