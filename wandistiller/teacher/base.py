"""The frozen teacher behind one method, and its decorators: guidance, and one owner for a node's ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from wandistiller.batch import Prediction, State, concat_batches, padded, split_prediction
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.network.sweep import block_by_block, only_here


class Teacher(Protocol):
    """A network that predicts velocities, wherever its weights live."""

    def predict_all(self, batches: Sequence[State], blocks: tuple[int, ...]) -> list[Prediction]:
        """v_BCFHW, float32, and the hidden states after `blocks` for batches of any experts.

        On the batches' device, without gradient.
        """
        ...

    def predict(self, batch: State, blocks: tuple[int, ...]) -> Prediction:
        """The same for one batch."""
        return self.predict_all([batch], blocks)[0]

    def velocity(self, batch: State) -> Tensor:
        """v_BCFHW on the batch's device, float32, without gradient."""
        return self.predict(batch, ()).v_BCFHW


@dataclass(frozen=True, slots=True)
class LocalTeacher(Teacher):
    """One network per expert, on this rank."""

    experts: dict[Expert, Network]
    """The network of each expert; both name the same one in a teacher with one expert."""
    device: torch.device | None = None
    """Device that inputs are moved to and outputs back from; None: the inputs' own."""
    sweeps: bool = False
    """True if weights arrive block by block, so that several batches go through the blocks together."""

    @torch.no_grad()
    def predict_all(self, batches: Sequence[State], blocks: tuple[int, ...]) -> list[Prediction]:
        made: dict[int, Prediction] = {}
        for network in dict.fromkeys(self.experts.values()):
            numbers = [i for i, batch in enumerate(batches) if self.experts[batch.expert] is network]
            calls = [partial(self._predict, network, batches[i], blocks) for i in numbers]
            results = block_by_block(network.blocks, calls) if self.sweeps else [call() for call in calls]
            made |= zip(numbers, results, strict=True)
        return [made[i] for i in range(len(batches))]

    def _predict(self, network: Network, batch: State, blocks: tuple[int, ...]) -> Prediction:
        home = batch.x_t_BCFHW.device
        there = batch.with_tensors([t.to(self.device or home) for t in batch.tensors()])
        features: dict[int, Tensor] = {}
        hooks = []
        for k in blocks:
            store = only_here(lambda *args, k=k: features.update({k: args[-1].to(home)}))
            hooks.append(network.blocks[k].register_forward_hook(store))
        try:
            return Prediction(network.velocity(there).to(home), features)
        finally:
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True, slots=True)
class Guidance:
    """Settings of classifier-free guidance."""

    null_text_LD: Tensor
    """Text states of the negative prompt; zero rows may follow."""
    scales: dict[Expert, float]


@dataclass(frozen=True, slots=True)
class GuidedTeacher(Teacher):
    """A teacher with classifier-free guidance folded into its output; hidden states are the text branch's.

    v_BCFHW = v_null + w (v_text - v_null). Source: Ho and Salimans 2022, arXiv:2207.12598. Of a batch whose
    samples have guidance in shares of their own, `guided_B`, w - 1 is multiplied by these, and only samples
    with some have the null branch.
    """

    inner: Teacher
    guidance: Guidance
    passes: int = 1
    """1: text and null branch in one forward pass; 2: one after the other."""

    def predict_all(self, batches: Sequence[State], blocks: tuple[int, ...]) -> list[Prediction]:
        pairs = [self._branches(batch) for batch in batches]
        if self.passes == 1:
            joined = self.inner.predict_all([concat_batches(pair) for pair in pairs], blocks)
            made = [split_prediction(*both) for both in zip(joined, pairs, strict=True)]
        else:
            made = [{"text": p} for p in self.inner.predict_all([pair["text"] for pair in pairs], blocks)]
            guided = {i: pair["null"] for i, pair in enumerate(pairs) if "null" in pair}
            for i, null in zip(guided, self.inner.predict_all([*guided.values()], ()), strict=True):
                made[i]["null"] = null
        return [self._guided(batch, of_batch) for batch, of_batch in zip(batches, made, strict=True)]

    def _branches(self, batch: State) -> dict[str, State]:
        """Return the batch with its text, and guided samples with the negative prompt; in as many rows."""
        if self.guidance.scales[batch.expert] == 1:
            return {"text": batch}  # the other would be multiplied by 0; config, so equal on all ranks
        given_BLD = batch.conditioning.text_BLD
        null_1LD = self.guidance.null_text_LD[None].to(given_BLD)
        rows = max(null_1LD.shape[1], given_BLD.shape[1])
        text_BLD = padded(given_BLD, rows)
        null_BLD = padded(null_1LD, rows).expand_as(text_BLD).contiguous()
        states = {
            name: replace(batch, guided_B=None, conditioning=replace(batch.conditioning, text_BLD=t_BLD))
            for name, t_BLD in (("text", text_BLD), ("null", null_BLD))
        }
        if batch.guided_B is not None:
            rows_B = self._rows(batch.guided_B)
            states["null"] = states["null"].with_tensors([t[rows_B] for t in states["null"].tensors()])
        return states

    def _rows(self, guided_B: Tensor) -> Tensor:
        """Return the numbers of the samples that have the null branch; at least one if it is a call."""
        rows_B = guided_B.nonzero().flatten()  # all ranks make the same calls
        return rows_B if len(rows_B) or self.passes == 1 else rows_B.new_zeros(1)

    def _guided(self, batch: State, branches: dict[str, Prediction]) -> Prediction:
        text = branches["text"]
        if "null" not in branches:
            return text
        v_null_BCFHW, scale = branches["null"].v_BCFHW, self.guidance.scales[batch.expert]
        if batch.guided_B is None:
            v_BCFHW = v_null_BCFHW + scale * (text.v_BCFHW - v_null_BCFHW)
        else:
            rows_B = self._rows(batch.guided_B)
            part_B1111 = ((scale - 1) * batch.guided_B[rows_B]).view(-1, 1, 1, 1, 1)
            away_BCFHW = part_B1111 * (text.v_BCFHW[rows_B] - v_null_BCFHW)
            v_BCFHW = text.v_BCFHW.index_add(0, rows_B, away_BCFHW)
        # copies, as views would keep the null half
        return Prediction(v_BCFHW, {k: h_BSD.clone() for k, h_BSD in text.features.items()})


@dataclass(frozen=True, slots=True)
class OwnerTeacher(Teacher):
    """A teacher on one rank of a node, which computes for all ranks there, one after the other."""

    inner: Teacher | None
    """None on the other ranks."""
    owner: int
    """Rank that computes on this node."""
    peers: list[int]
    """The ranks of this node."""
    ranks: Ranks = ALONE

    def predict_all(self, batches: Sequence[State], blocks: tuple[int, ...]) -> list[Prediction]:
        """The predictions for this rank's batches. Collective; the ranks' batches may differ in length."""
        return [self._predict(batch, blocks) for batch in batches]

    def _predict(self, batch: State, blocks: tuple[int, ...]) -> Prediction:

        def predict_for(theirs: list[Tensor]) -> list[Tensor]:
            prediction = self.inner.predict(batch.with_tensors(theirs), blocks)
            return [prediction.v_BCFHW, *(prediction.features[k] for k in blocks)]

        v_BCFHW, *features = collectives.call_owner(
            self.owner, self.peers, batch.tensors(), predict_for, self.ranks.replica_of
        )
        return Prediction(v_BCFHW, dict(zip(blocks, map(self.ranks.part, features), strict=True)))


def without_guidance(teacher: Teacher) -> Teacher:
    """The teacher's text branch alone, which an unpruned copy reproduces; collective if the teacher is."""
    if isinstance(teacher, GuidedTeacher):
        return teacher.inner
    if isinstance(teacher, OwnerTeacher) and teacher.inner:
        return replace(teacher, inner=without_guidance(teacher.inner))
    return teacher


def local_networks(teacher: Teacher) -> dict[Expert, Network]:
    """The networks of a teacher that are on this rank; none where another rank owns them."""
    if isinstance(teacher, LocalTeacher):
        return teacher.experts
    return local_networks(teacher.inner) if getattr(teacher, "inner", None) else {}


def owner_rank(teacher: Teacher) -> int:
    """A rank that has the teacher's modules, the same on all ranks. Collective."""
    return collectives.broadcast_object(teacher.owner) if isinstance(teacher, OwnerTeacher) else 0


def local_modules(teacher: Teacher) -> list[nn.Module]:
    """The modules on this rank of any teacher, each once."""
    return [network.module for network in dict.fromkeys(local_networks(teacher).values())]
