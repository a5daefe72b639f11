"""Adapters: low-rank matrices beside linear layers, the only weights that a run with `lora` trains."""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MethodType
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from wandistiller.network.config import NetworkConfig
from wandistiller.network.heads import PROJECTIONS
from wandistiller.network.names import SECOND_TIME
from wandistiller.utils.errors import RECIPE, Problem, problem
from wandistiller.utils.parameter_patterns import any_names, names_part, unknown_parts
from wandistiller.utils.validation import Count, Positive, Text, check, types_of, write

BASE_LAYER = ".base_layer."
"""Part of the names of a linear layer with an adapter (peft 0.21)."""
TARGETS = ["to_q", "to_k", "to_v", "to_out"]
"""What gets adapters if a recipe does not say it: the linear layers of attention, by diffusers' names."""


class LowRank(NamedTuple):
    """A change of a linear layer's weight: B A."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], with the factor of alpha and rank in it."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """The recipe key `lora`: only low-rank matrices of linear layers are trained, W + alpha / rank B A.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: Count = 16
    ranks: dict[str, Count] | None = None
    """Other ranks by part: the last pattern that names a layer counts."""
    alpha: Positive | None = None
    """None: each layer's rank, so that the factor is 1."""
    targets: Annotated[list[str], Field(min_length=1)] = field(default_factory=TARGETS.copy)
    """Parts whose linear layers get an adapter, as in `parameter_patterns.names_part`."""
    start: Annotated[
        Text | dict | list[Text | dict] | None, write('a file, or {"high_noise": FILE, "low_noise": FILE}')
    ] = None
    """LoRA files, as others made them, with which the adapters begin, as in `wan.added_lora.read_added`."""

    def rank_of(self, layer: str) -> int:
        return next(
            (r for part, r in reversed((self.ranks or {}).items()) if names_part(part, layer)), self.rank
        )


def lora_value_problems(settings: dict[str, Any] | None) -> list[str]:
    """List the unknown keys and wrong values of the recipe key `lora`."""
    return [] if settings is None else check("recipe", settings, types_of(Lora), "lora.")[0]


def lora_problems(lora: Lora, frozen: list[str] | None, config: NetworkConfig) -> list[str]:
    """List what does not fit the run in `lora`; `config.adapter_files` checks its files."""
    lacking = Problem("`lora` needs peft. Run: pip install peft", RECIPE, "lora")
    problems = [] if find_spec("peft") else [lacking]
    if frozen:
        remedy = "With `lora` all but the adapters is frozen; remove it."
        problems.append(problem("recipe", "frozen", frozen, remedy))
    layers = config.linear_layers
    problems += unknown_parts("recipe", "lora.targets", lora.targets, layers)
    targets = [layer for layer in layers if any_names(lora.targets, layer)]
    problems += unknown_parts("recipe", "lora.ranks", lora.ranks or (), layers)
    together = config.adapted_together
    named = {layer.rpartition(".")[2] for layer in targets} & {*together}
    if named and len(named) < len(together):
        remedy = f"diffusers reads files with adapters of both {' and '.join(together)}, or of neither."
        problems.append(problem("recipe", "lora.targets", lora.targets, remedy))
    return problems


def target_layers(lora: Lora, config: NetworkConfig) -> list[str]:
    return [n for n in config.linear_layers if any_names(lora.targets, n)]


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def add_lora(model: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze `model` but a second time, and add adapters with zero output at first, equal on every rank."""
    from peft import LoraConfig

    layers = [n for n in linear_layers(model) if not (n.startswith(PROJECTIONS) or SECOND_TIME in n)]
    targets = [name for name in layers if any_names(lora.targets, name)]
    ranks = {name: rank for name in targets if (rank := lora.rank_of(name)) != lora.rank}
    patterns = {re.escape(name): rank for name, rank in ranks.items()}  # peft's are regular expressions
    by_layer = {"rank_pattern": patterns, "alpha_pattern": {} if lora.alpha else patterns}
    alpha = lora.alpha or lora.rank
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets, **by_layer))
    for module in model.modules():
        if hasattr(module, "lora_A") and module.scaling["default"] == 1:
            module.forward = MethodType(_unscaled, module)
    for name, p in model.named_parameters():
        p.requires_grad_(is_adapter(name))


def _unscaled(layer: nn.Module, x: Tensor) -> Tensor:
    """Compute peft's layer whose factor is 1 without the product by it, which copies the output twice."""
    result, a, b = layer.base_layer(x), layer.lora_A["default"], layer.lora_B["default"]
    return (result + b(a(x.to(a.weight.dtype)))).to(result.dtype)


@torch.no_grad()
def begin_with(model: nn.Module, changes: dict[str, LowRank]) -> None:
    """Let the adapters of layers begin as changes B A; what they have beyond the rank of these is as new."""
    for layer, (a, b) in changes.items():
        module = model.get_submodule(layer)
        module.lora_A["default"].weight[: len(a)] = a
        module.lora_B["default"].weight[:, : len(a)] = b / module.scaling["default"]


@torch.no_grad()
def set_no_change(model: nn.Module) -> None:
    """Let the adapters of `model` change nothing, with the A that they have.

    Of two adapters with one A the mean of the weights, B A and 0 A, is the mean of the changes.
    """
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            p.zero_()


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' weights under the names of diffusers' loader."""
    from peft.utils import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def is_adapter(parameter: str) -> bool:
    """Return whether a run with `lora` trains a parameter: an adapter's (peft 0.21), or of a second time."""
    return ".lora_" in parameter or SECOND_TIME in parameter
