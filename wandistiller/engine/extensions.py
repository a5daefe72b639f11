"""DeepSpeed's C++ and CUDA extensions: which a run needs, and their builds before anything is loaded."""

from collections.abc import Iterator
from subprocess import SubprocessError

from deepspeed.ops import op_builder
from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException, OpBuilder

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.nvcc import with_fused_adam
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.logging import set_activity

# TypeError: async_io joins paths to the toolkit that is not there (deepspeed 0.19.8)
BUILD_ERRORS = (
    RuntimeError,
    SubprocessError,
    OSError,
    ImportError,
    TypeError,
    ValueError,
    MissingCUDAException,
    CUDAMismatchException,
)
OFFLOADED = {
    "adam": op_builder.CPUAdamBuilder,
    "adamw": op_builder.CPUAdamBuilder,
    "adagrad": op_builder.CPUAdagradBuilder,
    "lion": op_builder.CPULionBuilder,
}
"""Optimizer -> builder of the extension that DeepSpeed (0.19.8) steps it with where it is offloaded."""
NOT_OFFLOADED = {
    "adam": op_builder.FusedAdamBuilder,
    "adamw": op_builder.FusedAdamBuilder,
    "lamb": op_builder.FusedLambBuilder,
    "lion": op_builder.FusedLionBuilder,
}
"""The same where it is not."""


def needed(engine: EngineConfig) -> Iterator[type[OpBuilder]]:
    """Yield the builders of what an engine with this JSON loads."""
    builders = NOT_OFFLOADED if engine.optimizer_on == "none" else OFFLOADED
    builder = builders.get(engine.optimizer)
    if builder and not engine.section("optimizer.params").get("torch_adam", False):
        yield builder
    if engine.on_nvme:
        yield op_builder.AsyncIOBuilder


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
        except BUILD_ERRORS as error:
            remedy = "`wandistiller doctor` shows what is missing here"
            raise ConfigError(
                f"{key}: DeepSpeed's {made.name} does not build: {reason(error)}. {remedy}."
            ) from None


def reason(error: BaseException) -> str:
    """Return the line of a failed build that tells most: the compiler's first error, or the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[-1]).rstrip(".")
