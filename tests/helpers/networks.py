"""Networks of modules that a test made itself."""

from torch import nn

from wandistiller.network.network import Network
from wandistiller.wan.transformer_config import TransformerConfig


def network_of(module: nn.Module) -> Network:
    """Return a Wan transformer as a network that nothing was done to."""
    return Network(module, TransformerConfig.of(module.config))
