"""A teacher placed by the JSON's `zero_optimization`: a replica on each rank, or a ZeRO-Inference engine."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import deepspeed
from torch import nn

from wandistiller.batch import Expert
from wandistiller.distributed import collectives
from wandistiller.engine import nvme
from wandistiller.engine.ds_config import offload_device, stage
from wandistiller.engine.ds_schema import BLOCK, section_of, without_block
from wandistiller.engine.fetch_pace import fetching_blocks, pace_fetches
from wandistiller.engine.transfers import Topology, Transfer, ring_transfers
from wandistiller.engine.zero_memory import (
    Bytes,
    behind_bytes,
    gathered_bytes,
    module_of,
    partition_bytes,
    swapped_bytes,
)
from wandistiller.teacher.loading import load_sharded, load_whole
from wandistiller.teacher.placements.base import Placement, dtype_of, parameter_sizes
from wandistiller.utils.errors import problem
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.structure import BLOCK_CLASS, block_of, block_or_module
from wandistiller.wan.transformer import called_in_turn, numels, parameter_dtype
from wandistiller.wan.weight_reader import WeightReader

OVERHEAD = 40 * 2**20
"""Bytes of CPU memory of a ZeRO-Inference engine next to its weights and buffers (tests/bench/memory.py)."""


@dataclass(frozen=True, kw_only=True)
class Engine(Placement):
    """Replicated at stage 0; at stage 3 sharded, on accelerators, in CPU memory or on NVMe."""

    shards: Literal["world", "node"] = "world"
    """Ranks that stage 3 divides the weights among: all, or those of each node, so that none leaves it."""

    def describe(self, ds: dict[str, Any]) -> str:
        if stage(ds) == 0:
            return "replicated"
        home, within = offload_device(ds), " in each node" * (self.shards == "node")
        return f"sharded{within}{'' if home == 'none' else f' on {home}'}"

    def holds_quantized(self, ds: dict[str, Any]) -> bool:
        return section_of(ds, "zero_optimization").get("stage", 0) == 0

    def problems(self, where: str, ds: dict[str, Any], world: int) -> list[str]:
        if self.shards == "world" or section_of(ds, "zero_optimization").get("stage", 0) == 3:
            return []
        text = "Only an engine of stage 3 is sharded: write it, or remove this."
        return [problem(where, f"{BLOCK}.shards", self.shards, text)]

    def load(self, folder: WanFolder, expert: Expert, reader: WeightReader, ds: dict[str, Any]) -> nn.Module:
        config, dtype, device = folder.configs[expert], dtype_of(ds), collectives.device()
        if stage(ds) == 0:  # an engine would only copy rank 0's weights over everyone's
            return load_whole(reader, config, dtype, device, self.weights)
        # the module has its final, mixed precision; a bf16 section would cast all of it (deepspeed 0.19.8)
        engine_ds = {k: v for k, v in without_block(ds).items() if k not in ("bf16", "fp16")}
        engine_ds = fetching_blocks(engine_ds, BLOCK_CLASS)
        peers = collectives.node_peers() if self.shards == "node" else None
        if offload_device(ds) == "nvme":
            collectives.log0("starting DeepSpeed's async_io; its first build on a machine takes minutes")
            stored = reader.stored.items()
            swapped = [s.shape.numel() for name, s in stored if parameter_dtype(name, dtype) == dtype]
            sharers = len(peers) if peers else collectives.world_size()
            engine_ds = nvme.to_own_folder(engine_ds, swapped, f"teacher_{expert.value}", sharers)
        model = load_sharded(reader, config, dtype, engine_ds, device, peers)
        engine, *_ = deepspeed.initialize(model=model.eval(), config=engine_ds)
        pace_fetches(called_in_turn(model))
        # the engine's own forward refuses gradients through a frozen model (deepspeed 0.19.8)
        return engine.module

    def can_work_ahead(self, ds: dict[str, Any]) -> bool:
        return section_of(ds, "zero_optimization").get("stage", 0) == 0

    def sharers(self, topology: Topology) -> int:
        return topology.ranks_on_node if self.shards == "node" else topology.ranks

    def memory(self, config: dict[str, Any], ds: dict[str, Any], sharers: int) -> Bytes:
        if stage(ds) == 0:
            return super().memory(config, ds, sharers)
        sizes, home = parameter_sizes(config, ds), offload_device(ds)
        kept, transient = gathered_bytes(
            sizes, ds, sharers, unit_of=module_of if home == "nvme" else block_or_module
        )
        if home == "nvme":
            return Bytes(kept, transient) + swapped_bytes(sizes, ds, sharers, dtype_of(ds).itemsize)
        parts = partition_bytes(sizes, sharers)
        return Bytes(kept, transient, parts) if home == "cpu" else Bytes(kept + parts, transient)

    def behind(self, config: dict[str, Any], ds: dict[str, Any]) -> int:
        return behind_bytes(parameter_sizes(config, ds), ds, block_of) if stage(ds) == 3 else 0

    def overhead(self, ds: dict[str, Any]) -> int:
        return OVERHEAD if stage(ds) == 3 else 0

    def traffic(self, config: dict[str, Any], ds: dict[str, Any], topology: Topology) -> Iterator[Transfer]:
        if stage(ds) == 0:
            return
        whole, home, t = sum(numels(config).values()) * dtype_of(ds).itemsize, offload_device(ds), topology
        if home == "nvme":
            yield Transfer("its weights from disk", whole * t.ranks_on_node // self.sharers(t), "disk")
        if home != "none" and t.accelerator:
            yield Transfer("its weights over PCIe", whole // self.sharers(t), "pcie")
        within_node = self.shards == "node"
        yield from ring_transfers("its weights from the other ranks", whole, t, within_node=within_node)

    def is_candidate(self, ds: dict[str, Any], topology: Topology) -> bool:
        home, t = offload_device(ds), topology
        if stage(ds) == 0 or home == "nvme":
            return True
        if home == "cpu" and not t.accelerator:
            return False  # the weights are in CPU memory anyway
        if self.shards == "node":
            return t.accelerator and t.nodes > 1 and (home == "cpu" or t.ranks_on_node > 1)
        return home == "cpu" or t.ranks > 1
