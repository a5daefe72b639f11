"""The config of a network, and what its family alone knows of such networks: how they are made and called."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from wandistiller.batch import State
from wandistiller.distributed.sequence_parallel import Ranks
from wandistiller.engine.engine_config import Kernels
from wandistiller.network.names import BLOCKS, SECOND_TIME, in_block, is_in_block, parameter_dtype
from wandistiller.network.weight_reader import WeightReader
from wandistiller.utils.memoize import once_for_each


class NetworkConfig(Protocol):
    """The config.json of a network of one family, whose methods are all that others ask of that.

    Each family has one subclass, a dataclass. A `module` is a network of it.
    """

    kind: ClassVar[type[nn.Module]]
    """diffusers' class of the network."""
    block_class: ClassVar[str]
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    """What a student recomputes, as in its JSON -> modules inside of a block; the block itself for none."""
    adapted_together: ClassVar[tuple[str, ...]]
    """Linear layers of which a LoRA has adapters of all or of none, as diffusers reads it."""
    text_tokens: ClassVar[int]
    """The most rows of a prompt's states."""

    raw: dict[str, Any]
    """All keys of the file."""
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    text_dim: int
    out_channels: int
    """Channels of a latent."""
    patch_size: tuple[int, int, int]
    """Of time, height and width, in latent pixels."""
    given_places: list[int]
    """The numbers of the given frames in a clip: the first, or the first and the last."""
    given_fields: list[str]
    """The fields of `batch.Conditioning` that the given frames fill."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Take the values of a config.json, or of a network's own config."""

    def replaced(self, **values: Any) -> Self:
        """Return the config with other values of some keys."""

    @property
    def width(self) -> int:
        """Width of the hidden states."""

    @property
    def takes_image(self) -> bool:
        """True of a network that is given frames of the clip."""

    def meta(self, device: torch.device | None = None) -> nn.Module:
        """Make the network without memory for its parameters (meta device), with real tables on `device`."""

    def new(self) -> nn.Module:
        """Make the network with random weights, in float32."""

    def blank_state(
        self,
        latent: tuple[int, ...],
        samples: int = 1,
        text_tokens: int | None = None,
        device: str | torch.device = "cpu",
    ) -> State:
        """Return a state with the shapes that the network is given, float32, without values.

        Args:
            latent: shape CFHW.
            text_tokens: rows of the text; None: as many as the network takes.
        """

    @staticmethod
    def velocity(module: nn.Module, state: State, call: Callable[..., Any] | None = None) -> Tensor:
        """Predict v_BCFHW = noise - x0, float32; the only call of a network.

        Args:
            state: of any float dtypes, on the module's device.
            call: what is called in its place, as its engine; it has the module's arguments.
        """

    @property
    def one_time(self) -> dict[str, Any]:
        """The keys of the file, without those of a flow map's second time."""

    def with_second_time(self, has: bool = True) -> Self:
        """Return the config of a flow map, told the noise level to which its velocity leads; or of none."""

    @property
    def has_second_time(self) -> bool:
        """True of a flow map."""
        return self.raw != self.one_time

    @staticmethod
    def complete(module: nn.Module, reader: WeightReader | None = None) -> None:
        """Give weights of a second time those of `reader`, or, where they have none yet, the first time's."""

    @staticmethod
    def merge_text_padding(module: nn.Module) -> nn.Module:
        """Let the module compute cross-attention to a prompt's padding once, up to rounding."""

    @staticmethod
    def share_sequences(module: nn.Module, ranks: Ranks) -> nn.Module:
        """Let the module take whole inputs and give whole outputs, but compute this rank's tokens alone."""

    @staticmethod
    def use_kernels(module: nn.Module, kernels: Kernels) -> None:
        """Compute the blocks of the module with these kernels from now on."""

    @staticmethod
    def called_in_turn(module: nn.Module) -> list[nn.Module]:
        """Return the modules that have nearly all weights, in the order of their calls."""

    @staticmethod
    def share_tables(module: nn.Module, other: nn.Module) -> None:
        """Give the module these tables of another network of its config, where that computes."""

    def dtype_of(self, parameter: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter in a network of mixed precision, as diffusers loads it."""
        return parameter_dtype(self.kind, parameter, dtype)

    @property
    @once_for_each
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each parameter of the network, by name."""
        of_one_block, shapes = self.replaced(num_layers=1).meta(), {}
        block = {name: list(p.shape) for name, p in of_one_block.blocks[0].named_parameters()}
        numbers = range(self.num_layers)
        blocks = {in_block(k, name): shape for k in numbers for name, shape in block.items()}
        for name, p in of_one_block.named_parameters():
            shapes |= blocks if is_in_block(name) else {name: list(p.shape)}
        return shapes

    @property
    @once_for_each
    def numels(self) -> dict[str, int]:
        """The number of elements of each parameter of the network, by name."""
        return {name: prod(shape) for name, shape in self.shapes.items()}

    @property
    def linear_layers(self) -> list[str]:
        """The names of the linear layers that take adapters: only these have matrices for weights."""
        ends, names = ".weight", (n for n in self.shapes if SECOND_TIME not in n)
        return [n.removesuffix(ends) for n in names if n.endswith(ends) and len(self.shapes[n]) == 2]

    @property
    def numel(self) -> int:
        """The number of elements of all its parameters."""
        return sum(self.numels.values())

    @property
    def top_modules(self) -> list[str]:
        """The modules that a device map assigns to devices: each block, and the network's other modules."""
        children = self.replaced(num_layers=1).meta().named_children()
        others = [name for name, module in children if name != BLOCKS and list(module.parameters())]
        return [in_block(i) for i in range(self.num_layers)] + others
