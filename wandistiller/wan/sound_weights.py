"""Weights of a Wan that cannot be right: numbers that are not finite, and matrices of zeros."""

from collections.abc import Iterable
from pathlib import Path

from torch import nn

from wandistiller.network.weight_reader import NAMED
from wandistiller.utils.errors import ConfigError

MAY_BE_ZERO = ("to_out.", "ffn.net.2.", ".proj.")
"""Parts of names of matrices before a residual connection: zero in a block that was made to do nothing."""


def zero_problems(folder: Path, matrices: Iterable[str]) -> list[str]:
    """List the problem of `matrices`, names of tensors of two dimensions or more that hold nothing but zeros.

    A file has such where a download left a hole.
    """
    zero = sorted(name for name in matrices if not any(part in name for part in MAY_BE_ZERO))
    if not zero:
        return []
    more = f" and {len(zero) - NAMED} more" if len(zero) > NAMED else ""
    shown = ", ".join(f"`{name}`" for name in zero[:NAMED])
    remedy = "A download left holes in it, or it was never trained. Fetch the folder again."
    return [f"{folder}: {len(zero)} tensor(s) hold nothing but zeros: {shown}{more}. {remedy}"]


def require_sound(model: nn.Module, folder: Path) -> None:
    """Check the weights of a model that was loaded from `folder`, but for those that are not in memory.

    Raises:
        ConfigError: numbers that are not finite, or matrices of zeros.
    """
    zero, problems = [], []
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        low, high = parameter.detach().aminmax()
        if not (low.isfinite() and high.isfinite()):
            remedy = "Fetch the folder again."
            problems.append(f"{folder}: tensor `{name}` holds numbers that are not finite. {remedy}")
        elif low == high == 0 and parameter.ndim >= 2:
            zero.append(name)
    if problems := problems[:NAMED] + zero_problems(folder, zero):
        raise ConfigError(*problems)
