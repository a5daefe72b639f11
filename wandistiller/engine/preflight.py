"""Problems of a DeepSpeed JSON on this machine that can be known before an engine is built."""

import copy
from importlib.util import find_spec

import torch
from deepspeed import DeepSpeedConfig
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfigError
from pydantic import ValidationError

from wandistiller.distributed import device
from wandistiller.distributed.device import on_accelerator
from wandistiller.engine.compiler import has_compiler
from wandistiller.engine.ds_schema import BATCH_KEYS, BLOCK
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.extensions import lacks_nvcc
from wandistiller.engine.monitors import monitor_problems
from wandistiller.utils.validation import error_messages

SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "CommsLoggerConfig": "comms_logger",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
"""DeepSpeed's model of a section -> the section's name."""
PACKAGES = {
    "flash": ("flash_attn", "pip install flash-attn"),
    "_flash_3": ("flash_attn_interface", "FlashAttention 3, built from its sources"),
    "sage": ("sageattention", "pip install sageattention"),
}
"""Attention -> the module that it needs, and where that comes from."""

CHANGE = "Change or remove what it names."


def config_problems(engine: EngineConfig, *, here: bool = True) -> list[str]:
    """List what DeepSpeed's own reader refuses in its sections, and what this machine lacks.

    Args:
        here: whether the run is to be on this machine.
    """
    problems = _refused(engine)
    return (problems or _lacking(engine)) + _kernel_problems(engine) if here else problems


def _refused(engine: EngineConfig) -> list[str]:
    """List what DeepSpeed's own reader refuses."""
    where, probe = engine.where, copy.deepcopy(engine.without(*BATCH_KEYS).for_deepspeed)
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
    return []


def _lacking(engine: EngineConfig) -> list[str]:
    """List what this machine or its Python packages lack."""
    if (key := engine.on_nvme) and not AsyncIOBuilder().is_compatible(verbose=False):
        remedy = "Install libaio and a C++ compiler (Debian, Ubuntu: apt install libaio-dev g++)."
        text = f"DeepSpeed's async_io cannot be built here. {remedy}"
        return [engine.problem(f"zero_optimization.{key}.device", "nvme", text)]
    if key and lacks_nvcc() and not installed_ops.get("async_io"):
        remedy = (
            "On a machine with GPUs DeepSpeed compiles it with nvcc. Install the CUDA toolkit "
            f"{torch.version.cuda}, the version of torch's, and set CUDA_HOME, or write cpu."
        )
        return [engine.problem(f"zero_optimization.{key}.device", "nvme", remedy)]
    problems, section = [], engine.section("activation_checkpointing")
    if section.get("cpu_checkpointing") and not (section.get("partition_activations") or on_accelerator()):
        remedy = "On a CPU DeepSpeed has it only together with `partition_activations`: true."
        # else the copy would be the original
        problems.append(engine.problem("activation_checkpointing.cpu_checkpointing", True, remedy))
    return problems + monitor_problems(engine)


def _kernel_problems(engine: EngineConfig) -> list[str]:
    """List what this machine lacks for the kernels."""
    attention, key = engine.kernels.attention, f"{BLOCK}.attention"
    if engine.kernels.compile and not has_compiler():
        remedy = "It needs a C and C++ compiler, and Python.h (Debian, Ubuntu: apt install g++ python3-dev)."
        return [engine.problem(f"{BLOCK}.compile", True, f"{remedy} Install them, or write false.")]
    if attention == "native":
        return []
    if device.kind() != "cuda":
        remedy = "It needs a CUDA GPU, and there is none here. Write native, or leave it out."
        return [engine.problem(key, attention, remedy)]
    module, source = PACKAGES.get(attention, ("torch", ""))
    if not find_spec(module):
        return [engine.problem(key, attention, f"It needs {source}. Install it, or write native.")]
    return []
