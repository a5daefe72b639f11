"""DeepSpeed's C++ and CUDA extensions: which a run needs, their compiler, and their builds, done first."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.utils.cpp_extension
from deepspeed.git_version_info import installed_ops
from deepspeed.ops import op_builder
from deepspeed.ops.op_builder.builder import MissingCUDAException, OpBuilder, installed_cuda_version

from wandistiller.distributed.device import kind
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.logging import set_activity

HEADERS = ("cuda_runtime_api.h", "cusparse.h", "cublas_v2.h", "cusolverDn.h")
"""Files of the CUDA toolkit that torch's own headers include (2.13); packages with nvcc alone lack some."""


def needed(engine: EngineConfig) -> Iterator[type[OpBuilder]]:
    """Yield the builders of what an engine with this JSON loads."""
    if _takes_deepspeed_adam(engine):
        is_fused = engine.optimizer_on == "none"
        yield op_builder.FusedAdamBuilder if is_fused else op_builder.CPUAdamBuilder
    if engine.on_nvme:
        yield op_builder.AsyncIOBuilder


def _takes_deepspeed_adam(engine: EngineConfig) -> bool:
    return "optimizer" in engine.raw and not engine.section("optimizer.params").get("torch_adam", False)


def build(key: str, engine: EngineConfig) -> None:
    """Build what an engine needs, while a failure costs nothing yet.

    Args:
        key: of the recipe, which names the JSON, for messages.
    Raises:
        ConfigError: an extension does not build.
    """
    for builder in needed(with_fused_adam(engine)):
        made = builder()
        set_activity(f"building DeepSpeed's {made.name}")
        try:
            made.load(verbose=False)  # which builds it first if it is not there
        except Exception as error:  # of many kinds; async_io raises TypeError without a toolkit (0.19.8)
            remedy = "`wandistiller doctor` shows what is missing here"
            raise ConfigError(
                f"{key}: DeepSpeed's {made.name} does not build: {reason(error)}. {remedy}."
            ) from None


def reason(error: BaseException) -> str:
    """Return the line of a failed build that tells most: the compiler's first error, or the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[-1]).rstrip(".")


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
    is_compiled = _takes_deepspeed_adam(engine) and engine.optimizer_on == "none"
    if not is_compiled or installed_ops.get(op_builder.FusedAdamBuilder.NAME) or not lacks_nvcc():
        return engine
    params = engine.section("optimizer.params") | {"torch_adam": True, "fused": True}
    return engine.replaced(optimizer=engine.section("optimizer") | {"params": params})
