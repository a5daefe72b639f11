"""Problems of a DeepSpeed JSON on this machine that can be known before an engine is built."""

import copy
from importlib.util import find_spec
from typing import Any

import torch
from deepspeed import DeepSpeedConfig
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfigError
from pydantic import ValidationError

from wandistiller.distributed.device import on_accelerator, supports_fp16
from wandistiller.engine.ds_config import dtype_name, offload_section, on_nvme
from wandistiller.engine.ds_schema import BATCH_KEYS
from wandistiller.engine.monitors import MONITORS
from wandistiller.engine.nvcc import lacks_nvcc, needs_nvcc
from wandistiller.utils.errors import problem
from wandistiller.utils.validation import error_messages

SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsLoggerConfig": "comms_logger",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
"""DeepSpeed's model of a section -> the section's name."""
CHANGE = "Change or remove what it names."


def config_problems(where: str, ds: dict[str, Any], *, here: bool = True) -> list[str]:
    """List what DeepSpeed's own reader refuses in its sections, and what this machine lacks.

    Args:
        here: whether the run is to be on this machine.
    """
    probe = {k: v for k, v in copy.deepcopy(ds).items() if k not in BATCH_KEYS}
    probe["train_micro_batch_size_per_gpu"] = 1
    try:
        DeepSpeedConfig(probe)
    except ValidationError as error:
        section = SECTION_OF.get(error.title, "")
        # of the section as a whole, which would be printed with all defaults
        whole = [e["msg"].partition(", ")[2].rstrip(".") for e in error.errors() if not e["loc"]]
        named = [f"{where}: `{section}`: DeepSpeed refuses it: {text}. {CHANGE}" for text in whole]
        return named or error_messages(where, error, section)
    except (DeepSpeedConfigError, ValueError, TypeError, AttributeError, AssertionError) as error:
        return [f"{where}: DeepSpeed refuses it: {error}. {CHANGE}"]
    if not here:
        return []
    if (key := on_nvme(ds)) and not AsyncIOBuilder().is_compatible(verbose=False):
        remedy = "Install libaio and a C++ compiler (Debian, Ubuntu: apt install libaio-dev g++)."
        text = f"DeepSpeed's async_io cannot be built here. {remedy}"
        return [problem(where, f"zero_optimization.{key}.device", "nvme", text)]
    if problems := _machine_problems(where, ds):
        return problems
    if dtype_name(ds) == "float16" and not supports_fp16():
        text = "is enabled, here or by `mixed_precision`, but this machine's accelerator has none. Use bf16."
        return [f"{where}: `fp16` {text}"]
    return []


def _machine_problems(where: str, ds: dict[str, Any]) -> list[str]:
    """Return a problem for each thing that this machine or its Python packages lack."""
    problems, on_cpu = [], not on_accelerator()
    section, kind = ds.get("activation_checkpointing", {}), ds.get("optimizer", {}).get("type", "")
    offloaded = offload_section(ds, "optimizer")["device"] != "none"
    if on_cpu and section.get("cpu_checkpointing") and not section.get("partition_activations"):
        remedy = "On a CPU DeepSpeed has it only together with `partition_activations`: true."
        # else the copy would be the original
        problems.append(problem(where, "activation_checkpointing.cpu_checkpointing", True, remedy))
    if on_cpu and kind.lower() == "lion" and not offloaded:
        remedy = "On a CPU DeepSpeed has it only with `offload_optimizer`."
        problems.append(problem(where, "optimizer.type", kind, remedy))
    if lacks_nvcc():
        problems += _toolkit_problems(where, ds, kind)
    for key, (module, package) in MONITORS.items():
        if ds.get(key, {}).get("enabled") and not find_spec(module):
            problems.append(problem(where, f"{key}.enabled", True, f"It needs: pip install {package}"))
    return problems


def _toolkit_problems(where: str, ds: dict[str, Any], kind: str) -> list[str]:
    """Return a problem if DeepSpeed would have to compile with nvcc (deepspeed 0.19.8); Adam has another."""
    why = (
        "On a machine with GPUs DeepSpeed compiles it with nvcc. Install the CUDA toolkit "
        f"{torch.version.cuda}, the version of torch's, and set CUDA_HOME"
    )
    problems = []
    if needs_nvcc(ds) and "adam" not in kind.lower():
        remedy = f"{why}, or write AdamW, or offload the optimizer."
        problems.append(problem(where, "optimizer.type", kind, remedy))
    if (key := on_nvme(ds)) and not installed_ops.get("async_io"):
        problems.append(problem(where, f"zero_optimization.{key}.device", "nvme", f"{why}, or write cpu."))
    return problems
