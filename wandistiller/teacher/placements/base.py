"""Base classes of the teacher's placements: where its weights live, and the memory and transfers of that."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from wandistiller.engine.ds_schema import BLOCK
from wandistiller.engine.engine_config import CheckpointPolicy, EngineConfig, Kernels
from wandistiller.engine.zero_memory import Bytes, ParameterSize, Topology, one_at_a_time, partition_bytes
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.names import split_name
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher import quantized
from wandistiller.utils.memoize import once_for_each
from wandistiller.utils.validation import Index, types_of


@dataclass(frozen=True, kw_only=True)
class Placement(Kernels, ABC):
    """A placement of the frozen teacher."""

    on_one_rank: ClassVar[bool] = False
    """True if one rank of a node computes for all ranks there."""
    on_cpu: ClassVar[bool] = False
    """True if the teacher computes on the CPU, wherever the student does."""
    sweeps: ClassVar[bool] = False
    """True if weights arrive block by block, so that several calls go through the blocks together."""
    reads_at_calls: ClassVar[bool] = False
    """True if each call reads weights anew, with what is added to them."""
    memory_known: ClassVar[bool] = True
    """False if only loading shows where the weights go."""

    engine: EngineConfig
    """The JSON that names it; what follows are keys of its block "wandistiller"."""

    guidance_passes: Annotated[int, Field(ge=1, le=2)] = 1
    """2: text and null branch one after the other, for half the memory of a call."""
    weights: quantized.Weights = None
    """Format of the blocks' linear layers, in 8 or 4 bits."""

    ahead: bool | None = None
    """Predict for the next update while the optimizer updates the weights; left out: where there are GPUs."""

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @classmethod
    def keys(cls) -> dict[str, Any]:
        return {key: kind for key, kind in types_of(cls).items() if key != "engine"}

    def describe(self) -> str:
        return self.name

    def problems(self, world: int) -> list[str]:
        """Problems of the settings on `world` ranks, and of the JSON around them, which may have others."""
        if (stage := self.engine.stage) == 0:
            return []
        text = f"The placement {self.name} uses no ZeRO engine; write 0 or remove the section."
        return [self.engine.problem("zero_optimization.stage", stage, text)]

    def holds_quantized(self) -> bool:
        """Return whether it can have `weights`, with the JSON around it."""
        return True

    def compiles(self) -> bool:
        """Return whether its blocks are compiled, or may be where its JSON leaves that open."""
        cannot = self.on_cpu or self.on_one_rank or self.reads_at_calls or self.engine.stage == 3
        return self.compile or self.engine.is_compile_open and not cannot

    def can_be_shared(self) -> bool:
        """Return whether each rank has it where its student is, which may then have the same weights."""
        return False

    def weights_problems(self) -> list[str]:
        text = ""
        if self.weights and not self.holds_quantized():
            text = (
                "Neither a ZeRO engine of stage 3 nor a device map holds quantised weights. Leave it out, or "
                f'take a JSON of stage 0, or with `{BLOCK}.placement` "streamed", "host_cpu" or "owner".'
            )
        elif self.weights in ("int8", "nf4") and self.engine.section("fp16").get("enabled") is True:
            # int8: inputs times up to 127, unscaled; nf4: 128 / the range of its scales (torchao 0.18)
            text = "Its numbers overflow in fp16: write bf16, or the weights float8."
        return [self.engine.problem(quantized.KEY, self.weights, text)] if text else []

    def reads_all(self) -> bool:
        """Return whether all weights come from the readers that `load` is given."""
        return True

    def teacher_problems(self, modules: list[str], gpus: int) -> list[str]:
        """Problems of the settings with the teacher's top `modules` and this rank's GPUs."""
        return []

    def owner(self, peers: list[int]) -> int | None:
        """The rank of `peers`, those of a node, that computes for all of them; None if each computes."""
        return None

    @abstractmethod
    def load(self, folder: Folder, expert: Expert, reader: WeightReader) -> nn.Module:
        """Load one expert to its place. Collective, but for a placement on one rank."""

    def load_all(self, folder: Folder, readers: dict[Expert, WeightReader]) -> dict[Expert, nn.Module]:
        return {expert: self.load(folder, expert, reader) for expert, reader in readers.items()}

    def sweep(self, micro_steps: int, nbytes: int) -> int:
        """Micro-steps, of so many in an update, whose samples go through the network together.

        Args:
            nbytes: hidden states of a micro-step, which wait between two blocks.
        """
        return 1

    def can_work_ahead(self) -> bool:
        """Return whether a thread may call the network: no other rank takes part, and CPU time is left."""
        return False

    def works_ahead(self, *, on_gpu: bool) -> bool:
        """Return whether the network predicts for the next update while the weights are updated."""
        return self.can_work_ahead() and (on_gpu if self.ahead is None else self.ahead)

    def sharers(self, topology: Topology) -> int:
        """Ranks that the weights are divided among."""
        return 1

    @once_for_each
    def parameter_sizes(self, config: NetworkConfig) -> list[ParameterSize]:
        """The parameters of an expert in diffusers' mixed precision; quantised weights in several entries."""
        sizes = []
        for name, shape in config.shapes.items():
            item = config.dtype_of(name, self.engine.dtype).itemsize
            stored = [(prod(shape), item)]
            if quantized.is_quantized(name, shape, self.weights):
                stored = quantized.stored_sizes(shape, self.weights, item)
            sizes += [ParameterSize(name, *each) for each in stored]
        return sizes

    def memory(self, config: NetworkConfig, sharers: int) -> Bytes:
        """Memory of a rank for one expert; on one rank of a node, of that rank."""
        return Bytes(device=partition_bytes(self.parameter_sizes(config), ranks=1))

    def unpacked(self, config: NetworkConfig) -> int:
        item = self.engine.dtype.itemsize
        sizes = self._quantized(config).values()
        return max((quantized.unpacked_bytes(n, self.weights, item) for n in sizes), default=0)

    def unpacked_with_gradients(self, config: NetworkConfig, policy: CheckpointPolicy | None) -> int:
        """Bytes that a forward and backward pass takes for quantised weights, of networks that share them.

        Autograd keeps those of blocks that are not recomputed, at least of one; beside them a layer is
        unpacked.

        Args:
            policy: what is recomputed; None: nothing.
        """
        item, layers, saved, coming = self.engine.dtype.itemsize, config.num_layers, 0, 0
        numbers = policy.recomputed(layers) if policy else range(0)
        again = len(numbers) - (layers - 1 in numbers)  # the last one's are there as those of the others are
        parts = config.parts[policy.checkpoint] if policy else ()
        for name, n in self._quantized(config.replaced(num_layers=1)).items():
            stays = quantized.unpacked_until_backward(n, self.weights, item)
            inside = not parts or split_name(name)[1].partition(".")[0] in parts
            saved += stays * (layers - again * inside)
            coming = max(coming, quantized.unpacked_bytes(n, self.weights, item) - stays)
        return saved + coming

    def _quantized(self, config: NetworkConfig) -> dict[str, int]:
        every = config.shapes.items()
        return {name: prod(s) for name, s in every if quantized.is_quantized(name, s, self.weights)}

    def behind(self, config: NetworkConfig) -> int:
        """Bytes of weights that an accelerator still uses when the host has sent the next ones."""
        return 0

    def in_all(self, experts: list[Bytes]) -> Bytes:
        """Memory of a rank for all experts, from `memory` of each."""
        return one_at_a_time(experts)

    def overhead(self) -> int:
        return 0

    def fetched(self, config: NetworkConfig, topology: Topology) -> int:
        """Bytes of one expert's weights that come to a rank from CPU memory, or to its node from a disk.

        In one forward pass. None where they stay, or come from other ranks alone.
        """
        return 0

    def is_on_disk(self) -> bool:
        """Return whether `fetched` is read from a disk."""
        return False

    def is_candidate(self, topology: Topology) -> bool:
        """Return whether `auto` compares it: not where a simpler placement takes and moves the same."""
        return self.memory_known and not self.on_one_rank


@dataclass(frozen=True, kw_only=True)
class OnOneRank(Placement):
    """A placement on one rank of each node."""

    on_one_rank: ClassVar[bool] = True

    owner_rank: Index = 0
    """Rank within each node, from 0, that holds the teacher and computes for the others there.

    Of a node with fewer ranks it is the last one."""

    def describe(self) -> str:
        return f"{self.name} rank {self.owner_rank} of a node"

    def owner(self, peers: list[int]) -> int:
        return peers[min(self.owner_rank, len(peers) - 1)]
