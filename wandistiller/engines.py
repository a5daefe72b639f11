"""What DeepSpeed itself says of a JSON, before any weight is loaded."""

import copy
from typing import Any

from deepspeed import DeepSpeedConfig
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfigError
from pydantic import ValidationError

from wandistiller.config import problem
from wandistiller.deepspeed_json import dtype_name, offload_device
from wandistiller.deepspeed_keys import BATCH_KEYS


def config_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """Wrong types and values in DeepSpeed's sections, found by its own reader, as messages."""
    probe = {k: v for k, v in copy.deepcopy(ds).items() if k not in BATCH_KEYS} | {"train_micro_batch_size_per_gpu": 1}
    try:
        DeepSpeedConfig(probe)
    except ValidationError as error:
        return [f"{where}: `{'.'.join(map(str, e['loc']))}` is {e['input']!r}. {e['msg']}." for e in error.errors()]
    except (DeepSpeedConfigError, ValueError, TypeError, AssertionError) as error:
        return [f"{where}: DeepSpeed refuses it: {error}"]
    if offload_device(ds) == "nvme" and not AsyncIOBuilder().is_compatible(verbose=False):
        return [problem(where, "zero_optimization.offload_param.device", "nvme", "DeepSpeed's async_io cannot be built here. "
                        "Install libaio and a C++ compiler (Debian, Ubuntu: apt install libaio-dev g++).")]  # fmt: skip
    if dtype_name(ds) == "float16" and not get_accelerator().is_fp16_supported():
        return [f"{where}: `fp16` is enabled, but this machine's accelerator has none. Use bf16."]
    return []
