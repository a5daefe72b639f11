"""Adapters: low-rank matrices beside linear layers, the only weights that a run with `lora` trains."""

import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.student.projections_and_heads import PROJECTIONS
from wandistiller.utils.errors import ConfigError, problem
from wandistiller.utils.parameter_patterns import any_names, names_part, unknown_parts
from wandistiller.utils.validation import Count, Positive, Text, check, types_of, write
from wandistiller.wan import transformer
from wandistiller.wan.full_models import is_full_model
from wandistiller.wan.lora_experts import files_of
from wandistiller.wan.lora_files import left_out_words, read_lora
from wandistiller.wan.structure import ATTENTION_MAPS, IMAGE_MAPS
from wandistiller.wan.transformer_config import TransformerConfig


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
    targets: Annotated[list[str], Field(min_length=1)] = field(default_factory=ATTENTION_MAPS.copy)
    """Parts whose linear layers get an adapter, as in `parameter_patterns.names_part`."""
    start: Annotated[
        Text | dict[Literal["high_noise", "low_noise"], Text] | None,
        write('a file, or {"high_noise": FILE, "low_noise": FILE}'),
    ] = None
    """LoRA files or full models, as others made them, with which the adapters begin."""

    def rank_of(self, layer: str) -> int:
        return next(
            (r for part, r in reversed((self.ranks or {}).items()) if names_part(part, layer)), self.rank
        )

    @property
    def starts(self) -> list[tuple[Path, Expert | None]]:
        """The LoRA files and full models that adapters begin with, and the experts that they are said for."""
        given = self.start if isinstance(self.start, dict) else {"": self.start} if self.start else {}
        said = [(Path(place), Expert.of_key(key)) for key, place in given.items()]
        return [(file, expert) for place, expert in said for file in files_of(place, expert)]


def lora_value_problems(given: dict[str, Any] | None) -> list[str]:
    """List the unknown keys and wrong values of the recipe key `lora`."""
    return [] if given is None else check("recipe", given, types_of(Lora), "lora.")[0]


def lora_problems(lora: Lora, frozen: list[str] | None, config: TransformerConfig) -> list[str]:
    """List what does not fit the run in `lora`; weights of files that it names are not read."""
    problems = [] if find_spec("peft") else ["recipe: `lora` needs peft. Run: pip install peft"]
    if frozen:
        remedy = "With `lora` all but the adapters is frozen; remove it."
        problems.append(problem("recipe", "frozen", frozen, remedy))
    layers = linear_layers(transformer.meta_transformer(config))
    problems += unknown_parts("recipe", "lora.targets", lora.targets, layers)
    targets = [layer for layer in layers if any_names(lora.targets, layer)]
    problems += unknown_parts("recipe", "lora.ranks", lora.ranks or (), targets or layers)
    named = {layer.rpartition(".")[2] for layer in targets} & {*IMAGE_MAPS}
    if named and len(named) < len(IMAGE_MAPS):
        remedy = f"diffusers reads files with adapters of both {' and '.join(IMAGE_MAPS)}, or of neither."
        problems.append(problem("recipe", "lora.targets", lora.targets, remedy))
    return problems + _start_problems(lora, config, targets)


def _start_problems(lora: Lora, config: TransformerConfig, targets: list[str]) -> list[str]:
    """List the problems of the LoRA files that adapters begin with; `full_start` has those of full models."""
    problems = []
    for file in dict.fromkeys(place for place, _ in lora.starts):
        if is_full_model(file):
            continue
        try:
            read = read_lora(file, weights=False)
        except ConfigError as error:
            problems += error.problems
            continue
        named = f"recipe: `lora.start` is {file}, "
        layers = read.layers
        if other := read.other_layer(transformer.shapes(config)):
            text = f"which changes `{other}`, and this teacher has no such layer of that shape"
            problems.append(f"{named}{text}. Give a LoRA that was made for it.")
        elif without := sorted({layer.split(".", 2)[-1] for layer in layers if layer not in targets}):
            text = "which changes layers that have no adapter here. Add to `lora.targets`"
            problems.append(f"{named}{text}: {', '.join(without)}.")
        elif higher := [one.rank for layer, one in layers.items() if one.rank > lora.rank_of(layer)]:
            problems.append(f"{named}whose rank is {max(higher)}. Write that as `lora.rank`, or more.")
    return problems


def linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def add_lora(model: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze `model` and add adapters with zero output at first, equal on every rank."""
    from peft import LoraConfig

    layers = [name for name in linear_layers(model) if not name.startswith(PROJECTIONS)]
    targets = [name for name in layers if any_names(lora.targets, name)]
    ranks = {name: rank for name in targets if (rank := lora.rank_of(name)) != lora.rank}
    alphas = {} if lora.alpha else ranks  # peft takes the keys for regular expressions
    patterns = ({re.escape(name): value for name, value in some.items()} for some in (ranks, alphas))
    how = dict(zip(("rank_pattern", "alpha_pattern"), patterns, strict=True))
    alpha = lora.alpha or lora.rank
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets, **how))


@torch.no_grad()
def begin_with(model: nn.Module, file: Path) -> None:
    """Let the adapters of `model` begin as a LoRA file; what they have beyond its rank is as new."""
    read = read_lora(file)
    if left := read.left_out:
        collectives.log0("warning   %s: %s", file, left_out_words(left))
    for layer, change in read.layers.items():
        set_change(model, layer, *change)


@torch.no_grad()
def set_change(model: nn.Module, layer: str, a: Tensor, b: Tensor) -> None:
    """Let the adapter of a layer be b a, a [rank, in] and b [out, rank]; what it has beyond is left alone."""
    module, rank = model.get_submodule(layer), len(a)
    module.lora_A["default"].weight[:rank] = a
    module.lora_B["default"].weight[:, :rank] = b / module.scaling["default"]


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
    """Return whether a parameter's name is that of an adapter's weight (peft 0.21)."""
    return ".lora_" in parameter
