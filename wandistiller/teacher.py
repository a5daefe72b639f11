"""The frozen teacher behind one method, `velocity(batch)`. Where its weights live is read off its DeepSpeed JSON."""

from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from wandistiller import distributed, wan
from wandistiller.batch import Batch, Expert
from wandistiller.deepspeed_json import dtype_name, stage
from wandistiller.objectives import Teacher
from wandistiller.wan import WanFolder


@dataclass(frozen=True, slots=True)
class LocalTeacher:
    """One module per expert; an engine's module is just a module."""

    experts: dict[Expert, nn.Module]
    """Both names may mean one module, for a teacher with one expert."""

    @torch.no_grad()
    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW of the text branch alone, float32."""
        return wan.velocity(self.experts[batch.expert], batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD)


@dataclass(frozen=True, slots=True)
class GuidedTeacher:
    """Classifier-free guidance folded into the answer; text and null branch in one forward pass."""

    inner: Teacher
    null_text_LD: Tensor
    """The negative prompt's states, zero-padded to 512 tokens."""
    scales: dict[Expert, float]

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW = v_null + w (v_text - v_null), float32. Source: Ho and Salimans 2022, arXiv:2207.12598."""
        scale = self.scales[batch.expert]
        if scale == 1:  # the null branch would be multiplied by zero; equal on all ranks, as scale is config
            return self.inner.velocity(batch)
        null_BLD = self.null_text_LD.to(batch.text_BLD).expand_as(batch.text_BLD)
        both = batch.at(
            x_t_BCFHW=batch.x_t_BCFHW.repeat(2, 1, 1, 1, 1),
            sigma_B=batch.sigma_B.repeat(2),
            text_BLD=torch.cat([batch.text_BLD, null_BLD]),
        )
        v_text_BCFHW, v_null_BCFHW = self.inner.velocity(both).chunk(2)
        return v_null_BCFHW + scale * (v_text_BCFHW - v_null_BCFHW)


def build_teacher(folder: WanFolder, ds: dict[str, Any]) -> LocalTeacher:
    """Load every expert of `folder` into an engine as `ds` (checked by `teacher_engine`) says. Collective."""
    engines = {expert: _engine(folder, expert, ds) for expert in folder.configs}
    only = engines[Expert.HIGH_NOISE]
    return LocalTeacher({expert: engines.get(expert, only) for expert in Expert})


def _engine(folder: WanFolder, expert: Expert, ds: dict[str, Any]) -> nn.Module:
    dtype = getattr(torch, dtype_name(ds))
    # the module comes in its final, mixed precision; a bf16 section would cast all of it (deepspeed 0.19.8)
    ds = {k: v for k, v in ds.items() if k not in ("bf16", "fp16")}
    source, config = folder.path / expert.value, folder.configs[expert]
    if stage(ds) == 3:
        model = wan.load_sharded(source, config, dtype, ds, distributed.rank(), distributed.device())
    else:
        model = wan.load_whole(source, config, dtype)
    engine, *_ = deepspeed.initialize(model=model.eval().requires_grad_(False), config=ds)
    # called through .module: the engine's own forward refuses gradients through a frozen model (deepspeed 0.19.8)
    return engine.module.eval()
