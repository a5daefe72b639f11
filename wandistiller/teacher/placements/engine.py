"""A teacher placed by the JSON's `zero_optimization`: a replica on each rank, or a ZeRO-Inference engine."""

from dataclasses import dataclass
from typing import Literal

import deepspeed
from torch import nn

from wandistiller.distributed import collectives
from wandistiller.engine import nvme, zero_memory
from wandistiller.engine.workarounds import fetching_blocks, pace_fetches
from wandistiller.experts import Expert
from wandistiller.network.config import NetworkConfig
from wandistiller.network.folder import Folder
from wandistiller.network.names import block_of, block_or_module
from wandistiller.network.weight_reader import WeightReader
from wandistiller.teacher.loading import load_sharded, load_whole
from wandistiller.teacher.placements.base import Placement

OVERHEAD = 40 * 2**20
"""Bytes of CPU memory of a ZeRO-Inference engine next to its weights and buffers (tests/bench/memory.py)."""


@dataclass(frozen=True, kw_only=True)
class Engine(Placement):
    """Replicated at stage 0; at stage 3 sharded, on accelerators, in CPU memory or on NVMe."""

    shards: Literal["world", "node"] = "world"
    """Ranks that stage 3 divides the weights among: all, or those of each node, so that none leaves it."""

    def describe(self) -> str:
        if self.engine.stage == 0:
            return "replicated"
        home, within = self.engine.weights_on, " in each node" * (self.shards == "node")
        return f"sharded{within}{'' if home == 'none' else f' on {home}'}"

    def holds_quantized(self) -> bool:
        return self.engine.stage == 0

    def can_be_shared(self) -> bool:
        return self.engine.stage == 0

    def problems(self, world: int) -> list[str]:
        return []

    def load(self, folder: Folder, expert: Expert, reader: WeightReader) -> nn.Module:
        config, dtype, device = folder.configs[expert], self.engine.dtype, collectives.device()
        if self.engine.stage == 0:  # an engine would only copy rank 0's weights over everyone's
            return load_whole(reader, config, dtype, device, self.weights)
        # the module has its final, mixed precision; a bf16 section would cast all of it (deepspeed 0.19.8)
        engine_json = fetching_blocks(self.engine.without("bf16", "fp16"), config.block_class)
        peers = collectives.node_peers() if self.shards == "node" else None
        if engine_json.weights_on == "nvme":
            collectives.log0("starting DeepSpeed's async_io; its first build on a machine takes minutes")
            stored = reader.stored.items()
            swapped = [s.shape.numel() for name, s in stored if config.dtype_of(name, dtype) == dtype]
            sharers = len(peers) if peers else collectives.world_size()
            engine_json = nvme.to_own_folder(engine_json, swapped, f"teacher_{expert.value}", sharers)
        model = load_sharded(reader, config, dtype, engine_json, device, peers)
        engine, *_ = deepspeed.initialize(model=model.eval(), config=engine_json.for_deepspeed)
        pace_fetches(config.called_in_turn(model))
        # the engine's own forward refuses gradients through a frozen model (deepspeed 0.19.8)
        return engine.module

    def can_work_ahead(self) -> bool:
        return self.engine.stage == 0

    def sharers(self, topology: zero_memory.Topology) -> int:
        return topology.ranks_on_node if self.shards == "node" else topology.ranks

    def memory(self, config: NetworkConfig, sharers: int) -> zero_memory.Bytes:
        if self.engine.stage == 0:
            return super().memory(config, sharers)
        sizes, home = self.parameter_sizes(config), self.engine.weights_on
        unit_of = zero_memory.module_of if home == "nvme" else block_or_module
        held, transient = zero_memory.gathered_bytes(sizes, self.engine, sharers, unit_of=unit_of)
        if home == "nvme":
            return zero_memory.Bytes(held, transient) + zero_memory.swapped_bytes(sizes, self.engine, sharers)
        parts = zero_memory.partition_bytes(sizes, sharers)
        if home == "cpu":
            return zero_memory.Bytes(held, transient, host=parts)
        return zero_memory.Bytes(held + parts, transient)

    def behind(self, config: NetworkConfig) -> int:
        if self.engine.stage < 3:
            return 0
        return zero_memory.behind_bytes(self.parameter_sizes(config), self.engine, block_of)

    def overhead(self) -> int:
        return OVERHEAD if self.engine.stage == 3 else 0

    def fetched(self, config: NetworkConfig, topology: zero_memory.Topology) -> int:
        whole = config.numel * self.engine.dtype.itemsize // self.sharers(topology)
        if self.is_on_disk():
            return whole * topology.ranks_on_node
        return whole if self.engine.weights_on == "cpu" and topology.accelerator else 0

    def is_on_disk(self) -> bool:
        return self.engine.weights_on == "nvme"

    def is_candidate(self, topology: zero_memory.Topology) -> bool:
        home, t = self.engine.weights_on, topology
        if self.engine.stage == 0 or home == "nvme":
            return True
        if home == "cpu" and not t.accelerator:
            return False  # the weights are in CPU memory anyway
        if self.shards == "node":
            return t.accelerator and t.nodes > 1 and (home == "cpu" or t.ranks_on_node > 1)
        return home == "cpu" or t.ranks > 1
