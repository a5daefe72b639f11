"""The student in training: its DeepSpeed engines, one per expert."""

from typing import Any

import deepspeed
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wandistiller import distributed, wan
from wandistiller.batch import Answer, Batch, Expert
from wandistiller.blocks import Blocks


class Student:
    """The trained networks behind `velocity(batch)`, each in an engine of its own."""

    def __init__(self, models: dict[Expert, WanTransformer3DModel], ds: dict[str, Any]):
        """Put each model into an engine as `ds` (checked by `student_engine`) says. Collective."""
        if "activation_checkpointing" in ds:
            deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=ds)
        self._blocks = {expert: Blocks(model, ds) for expert, model in models.items()}
        self.engines = {expert: _engine(model, ds) for expert, model in models.items()}

    def engine(self, expert: Expert) -> Any:
        """The engine that learns from a batch of `expert`; a one-expert student has but one."""
        return self.engines.get(expert, self.engines[Expert.HIGH_NOISE])

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW, float32, with gradient where that is on."""
        return self.answer(batch).v_BCFHW

    def answer(self, batch: Batch) -> Answer:
        """The velocity and, while gradients are on, the projected hidden states of the blocks that are watched."""
        engine = self.engine(batch.expert)
        # ZeRO-3 counts micro-steps in the engine's own forward; past it, it keeps the last gradient only (0.19.8)
        network = engine if torch.is_grad_enabled() else engine.module
        v_BCFHW = wan.velocity(network, batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD)
        blocks = self._blocks.get(batch.expert, self._blocks[Expert.HIGH_NOISE])
        features, blocks.features = blocks.features, {}
        return Answer(v_BCFHW, features)


def _engine(model: WanTransformer3DModel, ds: dict[str, Any]) -> Any:
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=list(model.parameters()), config=ds)
    model.rope = wan.fresh_rope(model).to(distributed.device())  # data_types.buffer_dtype would have cast its tables
    return engine
