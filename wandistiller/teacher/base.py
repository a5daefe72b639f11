"""The frozen teacher behind one method, and its decorators: guidance, and one owner for a node's ranks."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from wandistiller.batch import Batch, Expert, Prediction, concat_batches, split_prediction
from wandistiller.distributed import collectives
from wandistiller.wan import transformer
from wandistiller.wan.text_padding import padded


class Teacher(Protocol):
    """A network that predicts velocities, wherever its weights live."""

    def predict(self, batch: Batch, blocks: tuple[int, ...]) -> Prediction:
        """v_BCFHW and the hidden states after `blocks`, on the batch's device, without gradient."""
        ...

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW on the batch's device, float32, without gradient."""
        return self.predict(batch, ()).v_BCFHW


@dataclass(frozen=True, slots=True)
class LocalTeacher(Teacher):
    """One module per expert; an engine's module is just a module."""

    experts: dict[Expert, nn.Module]
    """The module of each expert; both name the same one in a teacher with one expert."""
    device: torch.device | None = None
    """Device that inputs are moved to and outputs back from; None: the inputs' own."""

    @torch.no_grad()
    def predict(self, batch: Batch, blocks: tuple[int, ...]) -> Prediction:
        """v_BCFHW of the text branch alone, float32, and the hidden states after `blocks`."""
        model, home = self.experts[batch.expert], batch.x_t_BCFHW.device
        inputs = (t.to(self.device or home) for t in (batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD))
        features: dict[int, Tensor] = {}
        hooks = [
            model.blocks[k].register_forward_hook(lambda *args, k=k: features.update({k: args[-1].to(home)}))
            for k in blocks
        ]
        try:
            return Prediction(transformer.velocity(model, *inputs).to(home), features)
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
    """A teacher with classifier-free guidance folded into its output."""

    inner: Teacher
    guidance: Guidance
    passes: int = 1
    """1: text and null branch in one forward pass; 2: one after the other."""

    def predict(self, batch: Batch, blocks: tuple[int, ...]) -> Prediction:
        """v_BCFHW = v_null + w (v_text - v_null), float32, and the text branch's hidden states.

        Source: Ho and Salimans 2022, arXiv:2207.12598.
        """
        scale = self.guidance.scales[batch.expert]
        if scale == 1:  # the null branch would be multiplied by zero; equal on all ranks, as scale is config
            return self.inner.predict(batch, blocks)
        null_1LD = self.guidance.null_text_LD[None].to(batch.text_BLD)
        rows = max(null_1LD.shape[1], batch.text_BLD.shape[1])
        batch = replace(batch, text_BLD=padded(batch.text_BLD, rows))
        null = replace(batch, text_BLD=padded(null_1LD, rows).expand_as(batch.text_BLD).contiguous())
        if self.passes == 2:
            text, v_null_BCFHW = self.inner.predict(batch, blocks), self.inner.velocity(null)
        else:
            batches = {"text": batch, "null": null}
            branches = split_prediction(self.inner.predict(concat_batches(batches), blocks), batches)
            text, v_null_BCFHW = branches["text"], branches["null"].v_BCFHW
        v_BCFHW = v_null_BCFHW + scale * (text.v_BCFHW - v_null_BCFHW)
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

    def predict(self, batch: Batch, blocks: tuple[int, ...]) -> Prediction:
        """The prediction for this rank's batch. Collective; the ranks' batches may differ in length."""

        def predict_for(theirs: list[Tensor]) -> list[Tensor]:
            x_t_BCFHW, sigma_B, text_BLD = theirs
            their_batch = Batch(x_t_BCFHW, x_t_BCFHW, x_t_BCFHW, sigma_B, text_BLD, batch.expert)
            prediction = self.inner.predict(their_batch, blocks)
            return [prediction.v_BCFHW, *(prediction.features[k] for k in blocks)]

        v_BCFHW, *features = collectives.call_owner(
            self.owner, self.peers, [batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD], predict_for
        )
        return Prediction(v_BCFHW, dict(zip(blocks, features, strict=True)))


def without_guidance(teacher: Teacher) -> Teacher:
    """The teacher's text branch alone, which an unpruned copy reproduces; collective if the teacher is."""
    if isinstance(teacher, GuidedTeacher):
        return teacher.inner
    if isinstance(teacher, OwnerTeacher) and teacher.inner:
        return replace(teacher, inner=without_guidance(teacher.inner))
    return teacher


def local_modules(teacher: Teacher) -> dict[Expert, nn.Module]:
    """The modules of a teacher without guidance that are on this rank; none where another rank owns them."""
    if isinstance(teacher, OwnerTeacher):
        return local_modules(teacher.inner) if teacher.inner else {}
    return teacher.experts if isinstance(teacher, LocalTeacher) else {}


def owner_rank(teacher: Teacher) -> int:
    """A rank that has the teacher's modules, the same on all ranks. Collective."""
    return collectives.broadcast_object(teacher.owner) if isinstance(teacher, OwnerTeacher) else 0
