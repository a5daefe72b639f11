"""The frozen teacher behind one method, `velocity(batch)`. Where its weights live is read off its DeepSpeed JSON."""

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from wandistiller import dispatch, distributed, loading, swap, wan
from wandistiller.batch import Answer, Batch, Expert, join, split
from wandistiller.deepspeed_json import dtype_name, offload_device, stage
from wandistiller.objectives import Teacher
from wandistiller.placement import BLOCK, Placement, read_placement, without_block
from wandistiller.problems import ConfigError
from wandistiller.wan import WanFolder
from wandistiller.weights import WeightReader


@dataclass(frozen=True, slots=True)
class LocalTeacher(Teacher):
    """One module per expert; an engine's module is just a module."""

    experts: dict[Expert, nn.Module]
    """Both names may mean one module, for a teacher with one expert."""
    device: torch.device | None = None
    """Where the inputs go, if that is not where they are; the answer comes back."""

    @torch.no_grad()
    def answer(self, batch: Batch, blocks: tuple[int, ...]) -> Answer:
        """v_BCFHW of the text branch alone, float32, and the hidden states after `blocks`."""
        model, home = self.experts[batch.expert], batch.x_t_BCFHW.device
        inputs = (t if self.device is None else t.to(self.device) for t in (batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD))
        features: dict[int, Tensor] = {}
        hooks = [
            model.blocks[k].register_forward_hook(lambda *args, k=k: features.update({k: args[-1].to(home)})) for k in blocks
        ]
        try:
            return Answer(wan.velocity(model, *inputs).to(home), features)
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True, slots=True)
class Guidance:
    """What classifier-free guidance needs to know."""

    null_text_LD: Tensor
    """The negative prompt's states, zero-padded to 512 tokens."""
    scales: dict[Expert, float]


@dataclass(frozen=True, slots=True)
class GuidedTeacher(Teacher):
    """Classifier-free guidance folded into the answer."""

    inner: Teacher
    guidance: Guidance
    passes: int = 1
    """1: text and null branch in one forward pass; 2: one after the other."""

    def answer(self, batch: Batch, blocks: tuple[int, ...]) -> Answer:
        """v_BCFHW = v_null + w (v_text - v_null), float32, and the text branch's hidden states.

        Source: Ho and Salimans 2022, arXiv:2207.12598.
        """
        scale = self.guidance.scales[batch.expert]
        if scale == 1:  # the null branch would be multiplied by zero; equal on all ranks, as scale is config
            return self.inner.answer(batch, blocks)
        null = batch.at(text_BLD=self.guidance.null_text_LD.to(batch.text_BLD).expand_as(batch.text_BLD).contiguous())
        if self.passes == 2:
            text, v_null_BCFHW = self.inner.answer(batch, blocks), self.inner.velocity(null)
        else:
            batches = {"text": batch, "null": null}
            answers = split(self.inner.answer(join(batches), blocks), batches)
            text, v_null_BCFHW = answers["text"], answers["null"].v_BCFHW
        v_BCFHW = v_null_BCFHW + scale * (text.v_BCFHW - v_null_BCFHW)
        return Answer(v_BCFHW, {k: h_BSD.clone() for k, h_BSD in text.features.items()})  # no view that keeps the null half


@dataclass(frozen=True, slots=True)
class OwnerTeacher(Teacher):
    """The teacher lives on one rank of a node, which answers for all there, rank by rank: so the answers are a replica's."""

    inner: Teacher | None
    """None on the other ranks."""
    owner: int
    """Of this node."""
    peers: list[int]
    """The ranks of this node."""

    def answer(self, batch: Batch, blocks: tuple[int, ...]) -> Answer:
        """The answer to this rank's batch. Collective; the ranks' batches may differ in length."""

        def ask(theirs: list[Tensor]) -> list[Tensor]:
            x_t_BCFHW, sigma_B, text_BLD = theirs
            found = self.inner.answer(Batch(x_t_BCFHW, x_t_BCFHW, x_t_BCFHW, sigma_B, text_BLD, batch.expert), blocks)
            return [found.v_BCFHW, *(found.features[k] for k in blocks)]

        v_BCFHW, *features = distributed.exchange(self.owner, self.peers, [batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD], ask)
        return Answer(v_BCFHW, dict(zip(blocks, features, strict=True)))


def build_teacher(folder: WanFolder, ds: dict[str, Any], guidance: Guidance | None = None) -> Teacher:
    """Load every expert of `folder` to where `ds` (checked by `teacher_engine`) says. Collective.

    Raises:
        ConfigError: on every rank, if weights could not be read or are not finite on any.
    """
    placement, peers = read_placement(ds), distributed.node_peers()
    if found := distributed.agree_on_problems(_owner_problems(placement, peers)):
        raise ConfigError(*found)
    owner = peers[placement.owner_rank]
    here = not placement.on_one_rank or distributed.rank() == owner
    readers = {expert: WeightReader(folder.path / expert.value) for expert in folder.configs} if here else {}
    experts = {e: _LOADERS[placement.placement](folder, e, reader, ds) for e, reader in readers.items()}
    if problems := distributed.agree_on_problems([p for reader in readers.values() for p in reader.found_bad]):
        raise ConfigError(*problems)
    teacher: Teacher | None = None
    if here:
        device = torch.device("cpu") if placement.on_cpu else distributed.device()
        teacher = LocalTeacher({e: experts.get(e, experts[Expert.HIGH_NOISE]).eval() for e in Expert}, device)
        teacher = GuidedTeacher(teacher, guidance, placement.guidance_passes) if guidance else teacher
    return OwnerTeacher(teacher, owner, peers) if placement.on_one_rank else teacher


def _owner_problems(placement: Placement, peers: list[int]) -> list[str]:
    if placement.owner_rank < len(peers):
        return []
    return [f"`{BLOCK}.owner_rank` of the teacher's JSON is {placement.owner_rank}, but the node of rank {peers[0]} has "
            f"{len(peers)} rank(s); write 0 to {len(peers) - 1}."]  # fmt: skip


def _dtype(ds: dict[str, Any]) -> torch.dtype:
    return getattr(torch, dtype_name(ds))


def _engine(folder: WanFolder, expert: Expert, reader: WeightReader, ds: dict[str, Any]) -> nn.Module:
    """Replicated at stage 0; at stage 3 a ZeRO-Inference engine."""
    if stage(ds) == 0:  # an engine would only copy rank 0's weights over everyone's
        return loading.load_whole(reader, folder.configs[expert], _dtype(ds), distributed.device())
    # the module comes in its final, mixed precision; a bf16 section would cast all of it (deepspeed 0.19.8)
    engine_ds = {k: v for k, v in without_block(ds).items() if k not in ("bf16", "fp16")}
    peers = distributed.node_peers() if read_placement(ds).shards == "node" else None
    if offload_device(ds) == "nvme":
        distributed.log0("starting DeepSpeed's async_io; its first build on a machine takes minutes")
        dtype = _dtype(ds)
        swapped = [s.shape.numel() for name, s in reader.stored.items() if wan.parameter_dtype(name, dtype) == dtype]
        sharers = len(peers) if peers else distributed.world_size()
        engine_ds = swap.to_own_folder(engine_ds, swapped, f"teacher_{expert.value}", sharers)
    model = loading.load_sharded(reader, folder.configs[expert], _dtype(ds), engine_ds, distributed.device(), peers)
    engine, *_ = deepspeed.initialize(model=model.eval(), config=engine_ds)
    # called through .module: the engine's own forward refuses gradients through a frozen model (deepspeed 0.19.8)
    return engine.module


def _owned(folder: WanFolder, expert: Expert, reader: WeightReader, ds: dict[str, Any]) -> nn.Module:
    return loading.load_whole(reader, folder.configs[expert], _dtype(ds), distributed.device())


def _shared(folder: WanFolder, expert: Expert, reader: WeightReader, ds: dict[str, Any]) -> nn.Module:
    peers = distributed.node_peers()
    return loading.load_shared(reader, folder.configs[expert], _dtype(ds), peers)


def _mapped(folder: WanFolder, expert: Expert, reader: WeightReader, ds: dict[str, Any]) -> nn.Module:
    share, device = len(folder.configs), distributed.device()
    return dispatch.load_dispatched(reader, folder.configs[expert], _dtype(ds), read_placement(ds), share, device)


_LOADERS = {"engine": _engine, "owner": _owned, "host_cpu": _shared, "device_map": _mapped}
