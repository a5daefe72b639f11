"""Names of a network's blocks and parameters: its blocks are a list `blocks`, such as blocks.3."""

import torch
from torch import Tensor, nn

BLOCKS = "blocks"
SECOND_TIME = "delta_embedder"
"""Part of the names of the weights that a flow map has beside those of a network of one time."""


def in_block(number: int, name: str = "") -> str:
    """Return the whole name of a module or parameter of a block; of the block itself without `name`."""
    return f"{BLOCKS}.{number}.{name}".rstrip(".")


def split_name(name: str) -> tuple[int | None, str]:
    """Return the number of the block that a module or parameter is in, and its name there; None outside."""
    first, _, rest = name.partition(".")
    number, _, inside = rest.partition(".")
    return (int(number), inside) if first == BLOCKS and number else (None, name)


def is_in_block(name: str) -> bool:
    return split_name(name)[0] is not None


def block_of(parameter: str) -> str:
    """Return the block of a parameter, such as blocks.3; of others the first two parts of the name."""
    return ".".join(parameter.split(".")[:2])


def block_or_module(parameter: str) -> str:
    """Return the block of a parameter; of others the module."""
    return block_of(parameter) if is_in_block(parameter) else parameter.rpartition(".")[0]


def set_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter by `value`, without gradient."""
    *path, leaf = name.split(".")
    setattr(module.get_submodule(".".join(path)), leaf, nn.Parameter(value, requires_grad=False))


def parameter_dtype(network: nn.Module | type[nn.Module], name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in diffusers' from_pretrained: `_keep_in_fp32_modules` stay float32."""
    return torch.float32 if {*(network._keep_in_fp32_modules or ())} & {*name.split(".")} else dtype
