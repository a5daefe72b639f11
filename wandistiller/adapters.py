"""LoRA files: of a run that trained one, or cut out of the difference between a student and its teacher of the same shape."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.original import original_name
from wandistiller.tuning import adapter_state

EXACT = 512
"""Up to so many rows or columns a difference is decomposed in full; beyond, its largest directions are found by iteration."""
TURNS = 8
A, B = ".lora_A.weight", ".lora_B.weight"


class Adapter(NamedTuple):
    """Weights for W + B A, by diffusers' names of the layers."""

    state: dict[str, Tensor]
    """NAME.lora_A.weight [rank, in] and NAME.lora_B.weight [out, rank]."""
    alpha: float
    rank: int
    config: dict[str, Any] | None = None
    """peft's; None: alpha is the rank."""


def trained(model: WanTransformer3DModel) -> Adapter:
    """The one that a run with `lora` trained."""
    config = model.peft_config["default"]
    return Adapter(adapter_state(model), config.lora_alpha, config.r, config.to_dict())


class Extracted(NamedTuple):
    """An adapter cut out of a difference, and what it leaves of it."""

    adapter: Adapter
    kept: float
    """Share of the squared difference of the linear layers that the adapter has."""
    beside: float
    """Share of all squared difference that is not in linear layers' weights, which no LoRA holds."""


def extract(student: nn.Module, teacher: Callable[[str, Tensor], None], energy: float, most: int) -> Extracted:
    """The LoRA of least rank that keeps `energy` of the squared difference, one rank for all layers.

    Each layer's part is the best of its rank: the largest singular directions. Source: Eckart and Young 1936.

    Args:
        teacher: reads the teacher's parameter of a name into a tensor.
        energy: over 0, up to 1.
        most: the largest rank.
    """
    linear = {f"{name}.weight" for name, module in student.named_modules() if isinstance(module, nn.Linear)}
    cuts: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    inside = outside = 0.0
    squares = torch.zeros(most, dtype=torch.float64)
    for name, value in student.named_parameters():
        there = torch.empty(value.shape)
        teacher(name, there)
        difference = value.detach().float() - there
        size = difference.double().square().sum().item()
        if name not in linear:
            outside += size
            continue
        inside += size
        cuts[name.removesuffix(".weight")] = found = _directions(difference, most)
        squares[: len(found[1])] += found[1].double().square()
    reached = squares.cumsum(0) / (inside or 1.0)
    rank = min(int((reached < energy * (1 - 1e-9)).sum()) + 1, most) if inside else 1
    state: dict[str, Tensor] = {}
    for name, (u, s, v) in cuts.items():
        root = s[:rank].sqrt()  # shared out, so that neither factor is too small for half precision
        state |= {name + A: (v[:, :rank] * root).T.contiguous(), name + B: (u[:, :rank] * root).contiguous()}
    kept = reached[rank - 1].item() if inside else 1.0
    return Extracted(Adapter(state, rank, rank), min(kept, 1.0), outside / (inside + outside or 1.0))


def _directions(difference: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors, singular values and right vectors, the largest first, at most `most` of them."""
    if min(difference.shape) <= max(EXACT, most):
        u, s, vh = torch.linalg.svd(difference, full_matrices=False)
        return u[:, :most], s[:most], vh[:most].T
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.svd_lowrank(difference, most, TURNS)


def comfy_state(adapter: Adapter) -> dict[str, Tensor]:
    """Under the names that ComfyUI reads, and diffusers too.

    The factor alpha / rank is in the weights: diffusers 0.42.1 takes no `.alpha` of a layer outside the blocks.
    """
    found = {}
    for name, value in adapter.state.items():
        layer, _, part = name.rpartition(".lora_")
        renamed = "diffusion_model." + original_name(f"{layer}.").removesuffix(".")
        found[f"{renamed}.lora_{part}"] = value * (adapter.alpha / adapter.rank) if name.endswith(B) else value.contiguous()
    return found
