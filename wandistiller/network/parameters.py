"""The parameters of a network before it is built, counted on the meta device."""

from typing import NamedTuple

import torch

from wandistiller.network.network import Network, Trained
from wandistiller.utils.memoize import once_for_each
from wandistiller.wan.transformer_config import TransformerConfig


class Parameters(NamedTuple):
    """Elements of a network's parameters, by name."""

    trained: dict[str, int]
    frozen: dict[str, int] = {}

    @property
    def trained_numel(self) -> int:
        return sum(self.trained.values())

    @property
    def frozen_numel(self) -> int:
        return sum(self.frozen.values())


@once_for_each
def parameters_of(config: TransformerConfig, trained: Trained | None) -> Parameters:
    """Count the parameters of a network, adapters, projections and heads included."""
    with torch.device("meta"):
        module = Network.made(config).prepare(trained).module
    parameters = list(module.named_parameters())
    learning = {name: p.numel() for name, p in parameters if p.requires_grad and trained}
    return Parameters(learning, {name: p.numel() for name, p in parameters if name not in learning})
