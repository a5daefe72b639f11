"""NVIDIA's compiler, with which DeepSpeed builds optimizers for GPUs, and what replaces Adam without it."""

from pathlib import Path
from typing import NamedTuple

import torch.utils.cpp_extension
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version

from wandistiller.distributed.device import kind
from wandistiller.engine.engine_config import EngineConfig

FUSED = {"adam": "fused_adam", "adamw": "fused_adam", "lamb": "fused_lamb", "lion": "fused_lion"}
"""Optimizers that DeepSpeed compiles for GPUs, and the names of what it makes of them."""

HEADERS = ("cuda_runtime_api.h", "cusparse.h", "cublas_v2.h", "cusolverDn.h")
"""Files of the CUDA toolkit that torch's own headers include (2.13); packages with nvcc alone lack some."""


class Nvcc(NamedTuple):
    """Result of the search for the compiler."""

    fits: bool
    """It has the major version of torch's CUDA, and the toolkit's headers."""
    what: str
    """Version and folder, or what is missing, in words."""


def find_nvcc(expected: str) -> Nvcc:
    """Find the compiler; `expected` is the version of torch's CUDA."""
    try:
        installed = ".".join(map(str, installed_cuda_version()))
    except MissingCUDAException as error:
        return Nvcc(False, f"nvcc: {error}")
    where = f"nvcc {installed} in {torch.utils.cpp_extension.CUDA_HOME}"
    if installed.partition(".")[0] != expected.partition(".")[0]:
        return Nvcc(False, f"nvcc of torch's CUDA {expected}: there is {where}")
    home = Path(torch.utils.cpp_extension.CUDA_HOME)
    folders = [home / "include", *home.glob("targets/*/include"), Path("/usr/include")]  # the second: conda's
    if lacking := [name for name in HEADERS if not any((folder / name).is_file() for folder in folders)]:
        return Nvcc(False, f"headers of the CUDA toolkit, {', '.join(lacking)}: there is only {where}")
    return Nvcc(True, where)


def lacks_nvcc() -> bool:
    """Return whether DeepSpeed cannot compile for this machine's GPUs."""
    return kind() == "cuda" and bool(torch.version.cuda) and not find_nvcc(torch.version.cuda).fits


def with_fused_adam(engine: EngineConfig) -> EngineConfig:
    """Let torch's fused Adam replace DeepSpeed's, which is not there, on GPUs without nvcc.

    It takes no more memory: torch's default, for lists of tensors, takes 4 bytes a parameter (torch 2.13).
    """
    if not needs_nvcc(engine) or "adam" not in engine.optimizer or not lacks_nvcc():
        return engine
    params = engine.section("optimizer.params") | {"torch_adam": True, "fused": True}
    params.pop("bias_correction", None)  # torch's always corrects; false is refused by `preflight`
    return engine.replaced(optimizer=engine.section("optimizer") | {"params": params})


def needs_nvcc(engine: EngineConfig) -> bool:
    """Return whether the optimizer of a JSON is one that DeepSpeed compiles for GPUs (deepspeed 0.19.8)."""
    fused, plain = FUSED.get(engine.optimizer), engine.section("optimizer.params").get("torch_adam", False)
    return bool(fused) and engine.optimizer_on == "none" and not plain and not installed_ops.get(fused)
