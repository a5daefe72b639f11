"""A network: one transformer, made of any weights, and all that is done to it, in one order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from wandistiller.batch import Prediction, State
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.engine.engine_config import CheckpointPolicy, EngineConfig, Kernels
from wandistiller.network.adapters import BASE_LAYER, Lora, add_lora, is_adapter
from wandistiller.network.block_source import SOURCE
from wandistiller.network.blocks import Blocks
from wandistiller.network.config import NetworkConfig
from wandistiller.network.heads import add_heads, add_projections, of_made_patches
from wandistiller.network.names import set_parameter
from wandistiller.utils.memoize import once_for_each
from wandistiller.utils.parameter_patterns import any_names

Weights = Iterable[tuple[str, Tensor]]
"""Names and values of parameters."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The weights of a network that learn, and what training adds to them."""

    lora: dict[str, Any] | None = None
    """Settings of adapters, which alone learn then."""
    frozen: Sequence[str] = ()
    """Parts that do not learn, as in `parameter_patterns.names_part`."""
    seed: int = 0
    """Of the adapters' first weights."""
    compared: Sequence[int] = ()
    """Blocks whose hidden states are compared with the teacher's; each gets a projection, which learns."""
    teacher_width: int = 0
    has_heads: bool = False


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Settings of a network's computation, none of which changes a weight."""

    merges_padding: bool = False
    """Compute cross-attention to a prompt's padding once."""
    ranks: Ranks = ALONE
    """Those that share its samples."""
    kernels: Kernels = Kernels()
    recompute: CheckpointPolicy | None = None
    """What backward passes recompute; None: nothing."""
    copies: bool = False
    """Checkpoints keep copies of their inputs, as in `Blocks`."""

    @classmethod
    def of(cls, engine: EngineConfig, *, merges_padding: bool = False, ranks: Ranks = ALONE) -> Self:
        """Take kernels and checkpointing from the JSON of a network that learns."""
        recompute, copies = engine.recompute, engine.empties_inputs
        modifiers = {"kernels": engine.kernels, "recompute": recompute, "copies": copies}
        return cls(merges_padding=merges_padding, ranks=ranks, **modifiers)


class Network:
    """A transformer, and what was done to it."""

    def __init__(self, module: nn.Module, config: NetworkConfig):
        self.module, self.config = module, config
        self.trained: nn.Module = module
        """What an engine is given: the module, or its trained parts alone."""
        self.ranks = ALONE
        self._blocks: Blocks | None = None
        self._has_heads = False

    @classmethod
    def made(cls, config: NetworkConfig, weights: Weights = (), device: torch.device | None = None) -> Self:
        """Make a network of weights; those that are left out have no memory (meta device).

        Args:
            device: of its tables.
        """
        module = config.meta(device)
        for name, value in weights:
            set_parameter(module, name, value)
        config.complete(module)
        return cls(module, config)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.module.blocks

    def prepare(
        self,
        trained: Trained | None = None,
        begin: Callable[[nn.Module], None] | None = None,
        base: "Network | None" = None,
        computing: Computing | None = None,
    ) -> Self:
        """Do all that is to be done to the network, in the only order in which it goes together.

        Weights come first: adapters, then what learns, projections or heads, then the base in place of what
        does not learn. What computes wraps that: padding, shared sequences, kernels, checkpointing.

        Args:
            trained: None: nothing learns.
            begin: sets the first values of the adapters.
            base: the network whose weights take the place of all that do not learn, and its source of them.
            computing: left out for a network that is not called.
        """
        module = self.module
        if trained:
            module.requires_grad_(True)
            if trained.lora is not None:
                add_lora(module, Lora(**trained.lora), trained.seed)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and not any_names(trained.frozen, name))
            if trained.compared:
                add_projections(module, trained.compared, trained.teacher_width)
        if begin:
            begin(module)
        if trained and trained.has_heads:  # after the adapters, which freeze what there is
            add_heads(module)
            self._has_heads = True
        if base:
            self._replace_frozen(base)
        if computing:
            if computing.merges_padding:
                self.config.merge_text_padding(module)
            self.ranks = computing.ranks
            self.config.share_sequences(module, computing.ranks)
            self.config.use_kernels(module, computing.kernels)
            if any(p.requires_grad for p in module.parameters()):
                parts, copies = self.config.parts, computing.copies
                self._blocks = Blocks(module, parts, computing.recompute, copies=copies)
        return self

    def _replace_frozen(self, base: "Network") -> None:
        """Replace the frozen weights by those of `base`, which both then have, and hide them from engines."""
        for name, p in list(self.module.named_parameters()):
            if not p.requires_grad:
                path, _, leaf = name.rpartition(".")
                shared = base.module.get_parameter(name.replace(BASE_LAYER, "."))
                self.module.get_submodule(path)._parameters[leaf] = shared
        self.config.share_tables(self.module, base.module)
        if source := getattr(base.module, SOURCE, None):
            source.serve(self.module)
        self.trained = TrainedParts(self.module)

    def velocity(self, state: State, call: Callable[..., Any] | None = None) -> Tensor:
        """Return v_BCFHW, float32; see `NetworkConfig.velocity`."""
        return self.config.velocity(self.module, state, call)

    def predict(self, state: State, call: Callable[..., Any] | None = None) -> Prediction:
        """Return the velocity and, with gradients on, what projections or heads made of hidden states."""
        v_BCFHW, features = self.velocity(state, call), {}
        if self._blocks:
            features, self._blocks.features = self._blocks.features, {}
        if self._has_heads:
            features = of_made_patches(features, state, self.ranks)
        return Prediction(v_BCFHW, features, self.ranks.mean)

    def slope(
        self, state: State, value: Callable[[Prediction], Tensor], call: Callable[..., Any] | None = None
    ) -> Tensor:
        """Return the gradient in x_t_BCFHW of a number computed from the prediction; no weight gets one."""
        x_t_BCFHW = state.x_t_BCFHW.detach().requires_grad_()
        with torch.enable_grad(), self._blocks.stored():
            prediction = self.predict(replace(state, x_t_BCFHW=x_t_BCFHW), call)
            slope_BCFHW, *_ = torch.autograd.grad(value(prediction), x_t_BCFHW)
        return self.ranks.mean(slope_BCFHW)


class TrainedParts(nn.Module):
    """The trained parts of a network, under the names that they have there: all that an engine is to know.

    The rest is hidden from it, so that it neither casts, moves, cuts nor stores it.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self._hidden = (module.train(),)
        for name, part in module.named_modules():
            if any(p.requires_grad for p in part.parameters(recurse=False)):
                *path, leaf = name.split(".")
                place: nn.Module = self
                for step in path:
                    if step not in place._modules:
                        place.add_module(step, nn.Module())
                    place = place._modules[step]
                place.add_module(leaf, part)

    def forward(self, **inputs: Any) -> Any:
        return self._hidden[0](**inputs)


def zeros(config: NetworkConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of zeros, float32 on the CPU, to be filled from a checkpoint."""
    for name, shape in config.shapes.items():
        yield name, torch.zeros(shape)


def without_memory(config: NetworkConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield weights of zeros, float32 on the CPU, that take no memory, to be replaced; no second time's."""
    for name, shape in config.shapes.items():
        if not is_adapter(name):
            yield name, torch.zeros(()).expand(shape)


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
def parameters_of(config: NetworkConfig, trained: Trained | None) -> Parameters:
    """Count the parameters of a network, adapters, projections and heads included."""
    with torch.device("meta"):
        module = Network.made(config).prepare(trained).module
    parameters = list(module.named_parameters())
    learning = {name: p.numel() for name, p in parameters if p.requires_grad and trained}
    return Parameters(learning, {name: p.numel() for name, p in parameters if name not in learning})
