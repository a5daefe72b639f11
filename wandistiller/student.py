"""The student in training: its DeepSpeed engines, one per expert."""

import math
from typing import Any

import deepspeed
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from wandistiller import blocks, distributed, swap, wan
from wandistiller.batch import Answer, Batch, Expert
from wandistiller.blocks import Blocks
from wandistiller.deepspeed_json import on_nvme
from wandistiller.ema import Ema
from wandistiller.engines import (
    forget_powers,
    forget_trial_step,
    mend_flops_profiler,
    moved_part_by_part,
    skip_bad_gradients,
)
from wandistiller.fragments import Trained
from wandistiller.monitors import Monitors, without_monitors
from wandistiller.placement import without_block
from wandistiller.recompute import read_recompute
from wandistiller.tuning import parameter_groups


class Student:
    """The trained networks behind `velocity(batch)`, each in an engine of its own."""

    def __init__(self, models: dict[Expert, WanTransformer3DModel], ds: dict[str, Any], *,
                 learning_rates: dict[str, float] | None = None, ema: float | None = None, ema_start: int = 0):  # fmt: skip
        """Put each model into an engine as `ds` (checked by `student_engine`) says. Collective.

        Args:
            models: as `tuning.tune` left them.
            learning_rates: factors by part, as in `parts.factor`.
            ema: decay of the average of the weights, which begins after `ema_start` steps.
        """
        again, ds = read_recompute(ds), without_block(ds)
        if again:
            blocks.configure(ds)
        self._blocks = {expert: Blocks(model, again) for expert, model in models.items()}
        self.engines = {expert: _engine(model, ds, learning_rates or {}, expert) for expert, model in models.items()}
        self.monitors, *_ = map(Monitors, self.engines.values())
        self.trained = {expert: Trained(engine) for expert, engine in self.engines.items()}
        for optimizer in {id(o): o for t in self.trained.values() for o in map(t.optimizer, t.flats)}.values():
            optimizer.register_step_pre_hook(lambda optimizer, *_: forget_powers(optimizer))
        self.averages = {expert: Ema(t, ema, ema_start) for expert, t in self.trained.items() if ema is not None}

    def engine(self, expert: Expert) -> Any:
        """The engine that learns from a batch of `expert`; a one-expert student has but one."""
        return self.engines.get(expert, self.engines[Expert.HIGH_NOISE])

    def average(self, expert: Expert, done: int) -> None:
        """Take the weights after `done` steps of the run into the average of the expert that the last step trained.

        The other expert's waits for its own turn, as its weights do: the decay counts updates, whatever share of them an
        expert has.
        """
        for trained, average in self.averages.items():
            if self.engines[trained] is self.engine(expert):
                average.update(done)

    def state(self, expert: Expert) -> dict[str, Any]:
        """What a person wants to know of the engine after a step: gradient norm, learning rate, loss scale, if it was skipped."""
        engine = self.engine(expert)
        norm = engine.get_global_grad_norm()
        found = {"grad_norm": float(norm) if norm is not None and math.isfinite(norm) else None, "lr": engine.get_lr()[0]}
        if engine.fp16_enabled():  # a gradient beyond its range skips the step and lowers the scale
            found["loss_scale"] = engine.optimizer.loss_scale
        if not engine.was_step_applied():
            found["skipped"] = True
        return found

    def velocity(self, batch: Batch) -> Tensor:
        """v_BCFHW, float32, with gradient where that is on."""
        return self.answer(batch).v_BCFHW

    def answer(self, batch: Batch) -> Answer:
        """The velocity and, while gradients are on, the projected hidden states of the blocks that are watched."""
        engine = self.engine(batch.expert)
        # ZeRO-3 counts micro-steps in the engine's own forward; past it, it keeps the last gradient only (0.19.8)
        network = engine if torch.is_grad_enabled() else engine.module
        v_BCFHW = wan.velocity(network, batch.x_t_BCFHW, batch.sigma_B, batch.text_BLD)
        watched = self._blocks.get(batch.expert, self._blocks[Expert.HIGH_NOISE])
        features, watched.features = watched.features, {}
        return Answer(v_BCFHW, features)


def _engine(model: WanTransformer3DModel, ds: dict[str, Any], learning_rates: dict[str, float], expert: Expert) -> Any:
    groups, ds = parameter_groups(model, learning_rates, ds)
    if ds.get("flops_profiler", {}).get("enabled"):
        mend_flops_profiler()
    if on_nvme(ds):
        distributed.log0("starting DeepSpeed's async_io; its first build on a machine takes minutes")
        ds = swap.to_own_folder(ds, [p.numel() for p in model.parameters()], f"student_{expert.value}",
                                distributed.world_size())
    if expert is not Expert.HIGH_NOISE:  # one is there for all
        ds = without_monitors(ds)
    with moved_part_by_part(model, ds):
        engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=groups, config=ds)
    forget_trial_step(engine)
    skip_bad_gradients(engine)
    model.rope = wan.fresh_rope(model).to(distributed.device())  # data_types.buffer_dtype would have cast its tables
    return engine
