"""A network in training, the student or its critic: DeepSpeed engines, one per expert."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from wandistiller.batch import STUDENT, Prediction, State, concat_batches, split_prediction
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.engine import nvme
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.fetch_pace import pace_fetches
from wandistiller.engine.monitors import Monitors, without_monitors
from wandistiller.engine.nvcc import with_fused_adam
from wandistiller.engine.optimizer_state import WEIGHTS, MasterWeights
from wandistiller.engine.workarounds import (
    leave_out_reduction_of_one_rank,
    may_lower_loss_scale,
    partition_before_moving,
    reset_adam_step_cache,
    share_adam_s_time,
    skip_nonfinite_steps,
    uncount_skipped_step,
    uncounted,
    without_dummy_step,
    without_empty_buckets,
)
from wandistiller.experts import Expert
from wandistiller.student.blocks import Blocks
from wandistiller.student.ema import Ema
from wandistiller.student.projections_and_heads import of_made_patches
from wandistiller.student.shared_base import whole_network
from wandistiller.student.trainable import parameter_groups
from wandistiller.wan import transformer
from wandistiller.wan.context_parallel import share_sequences
from wandistiller.wan.text_padding import merge_text_padding
from wandistiller.wan.transformer import use_kernels


class Learner:
    """The networks of one role, each in its own engine."""

    def __init__(
        self,
        models: dict[Expert, nn.Module],
        config: EngineConfig,
        *,
        learning_rates: dict[str, float] | None = None,
        ema: float | None = None,
        ema_start: int = 0,
        role: str = STUDENT,
        frozen: dict[Expert, nn.Module] | None = None,
        merges_padding: bool = False,
        ranks: Ranks = ALONE,
    ):
        """Put each model into an engine. Collective.

        Args:
            models: from `set_trainable`, or `on_base`.
            learning_rates: factors by part, as in `parameter_patterns.factor`.
            ema: decay of the average of the weights, which begins after `ema_start` steps.
            role: only the student has the run's monitors.
            frozen: networks of other experts, which do not learn, on the device that they compute on.
            merges_padding: compute cross-attention to a prompt's padding once.
        """
        # DeepSpeed multiplies the batch up itself, from ranks, of which several may share a sample
        config = config.without("train_batch_size")
        policy, copies, kernels = config.recompute, config.empties_inputs, config.kernels
        if policy:  # global to the process
            deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config.for_deepspeed)
        rates, self._frozen, self.ranks = learning_rates or {}, frozen or {}, ranks
        self._has_heads = role != STUDENT  # whose blocks have projections
        self.networks = {expert: whole_network(model) for expert, model in models.items()}
        for model in self.all_networks:
            if merges_padding:
                merge_text_padding(model)
            share_sequences(model, ranks)
            use_kernels(model, kernels)
        self._blocks = {e: Blocks(network, policy, copies=copies) for e, network in self.networks.items()}
        self.engines = {}
        for expert, model in models.items():  # the first engine of the student has the run's monitors
            monitored = role == STUDENT and not self.engines
            own = config if monitored else without_monitors(config)
            self.engines[expert] = _engine(model, own, rates, f"{role}_{expert.value}")
        self.monitors, *_ = map(Monitors, self.engines.values())
        self.trained = {expert: MasterWeights(engine) for expert, engine in self.engines.items()}
        first, *_ = self.engines.values()
        self._uncounted = {e: uncounted(engine, engine.module) for e, engine in self.engines.items()}
        self._uncounted |= {e: uncounted(first, network) for e, network in self._frozen.items()}
        self._hook_optimizers()
        averaged = {} if ema is None else self.trained
        self._lr, self._may_lower_scale = 0.0, False
        self.averages = {expert: Ema(trained, ema, ema_start) for expert, trained in averaged.items()}

    def _hook_optimizers(self) -> None:
        optimizers = {id(o): o for t in self.trained.values() for o in map(t.optimizer, t.flats)}
        self._meanwhile: Callable[[], None] | None = None
        for optimizer in optimizers.values():
            share_adam_s_time(optimizer)
            optimizer.register_step_pre_hook(self._before_optimizer)

    @property
    def blocks(self) -> list[nn.Module]:
        return [block for network in self.all_networks for block in network.blocks]

    @property
    def all_networks(self) -> list[nn.Module]:
        """Those that learn and those that do not."""
        return [*self.networks.values(), *self._frozen.values()]

    def engine(self, expert: Expert) -> Any:
        """Return the engine that trains on batches of `expert`; where one is trained there is only one."""
        return self.engines[self._trained_for(expert)]

    def _trained_for(self, expert: Expert) -> Expert:
        return expert if expert in self.engines else next(iter(self.engines))

    def predict(self, batches: dict[str, State]) -> dict[str, Prediction]:
        """Make one forward pass for all kinds of states, as engines count a backward by its forward."""
        return split_prediction(self.forward(concat_batches(batches)), batches)

    def backward(self, expert: Expert, loss: Tensor) -> None:
        """Add to the gradients of the expert's engine, which divides `loss` by the number of micro-steps."""
        self.engine(expert).backward(loss)

    def step(self, expert: Expert) -> None:
        """Finish a micro-step; after the last one the engine updates the weights."""
        engine = self.engine(expert)
        self._lr = engine.get_lr()[0]  # of this step: the engine's schedule advances in it
        self._may_lower_scale = may_lower_loss_scale(engine)
        engine.step()

    def while_updating(self, begin: Callable[[], None] | None) -> None:
        """Call `begin`, once, when an optimizer begins the next update; it starts work in another thread."""
        self._meanwhile = begin

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reset_adam_step_cache(optimizer)
        begin, self._meanwhile = self._meanwhile, None
        if begin:
            begin()

    def lost_update(self, expert: Expert) -> bool:
        """Return whether the last step changed nothing, except by a float16 loss scale, which adapts."""
        return not (self.engine(expert).was_step_applied() or self._may_lower_scale)

    def forget_skipped_step(self, expert: Expert) -> None:
        """Uncount the step that the expert's engine has just skipped, if it did."""
        if not self.engine(expert).was_step_applied():
            uncount_skipped_step(self.engine(expert))

    def advance_schedules(self, expert: Expert) -> None:
        """Advance the learning rates of the engines that made no update in a step of `expert`."""
        used = self.engine(expert)
        for engine in self.engines.values():
            if not (engine is used and engine.was_step_applied()) and engine.lr_scheduler is not None:
                engine.lr_scheduler.step()

    def update_ema(self, expert: Expert, done: int) -> None:
        """Add the weights after `done` steps of the run to the average of the expert of the last step.

        The other expert's average waits, as its weights do: the decay counts an expert's own updates.
        """
        for trained, average in self.averages.items():
            if self.engines[trained] is self.engine(expert):
                average.update(done)

    @torch.no_grad()
    def follow(self, other: "Learner", share: float) -> None:
        """Move the weights by a share of the way to those of `other`, which is of the same shape and JSON.

        Source: intra-distribution alignment of SenseFlow, Ge et al. 2025, arXiv:2506.00523.
        """
        for expert, trained in self.trained.items():
            theirs = other.trained[expert]
            for flat, ahead in zip(trained.flats, theirs.flats, strict=True):
                with trained.opened(flat, changed=True), theirs.opened(ahead):
                    trained.tensors(flat)[WEIGHTS].lerp_(theirs.tensors(ahead)[WEIGHTS], share)
            trained.publish()

    def state(self, expert: Expert) -> dict[str, Any]:
        """Return the last step's gradient norm, learning rate, loss scale, and whether it was skipped."""
        engine = self.engine(expert)
        norm = engine.get_global_grad_norm()
        is_finite = norm is not None and math.isfinite(norm)
        state = {"grad_norm": float(norm) if is_finite else None, "lr": self._lr}
        if engine.fp16_enabled():  # a gradient beyond its range skips the step and lowers the scale
            state["loss_scale"] = engine.optimizer.loss_scale
        if not engine.was_step_applied():
            state["skipped"] = True
        return state

    def velocity(self, batch: State) -> Tensor:
        """Return v_BCFHW, float32, with gradient if that is enabled."""
        return self.forward(batch).v_BCFHW

    def slope(self, batch: State, value: Callable[[Prediction], Tensor]) -> Tensor:
        """Return the gradient in x_t_BCFHW of a number computed from the prediction; no weight gets one."""
        x_t_BCFHW = batch.x_t_BCFHW.detach().requires_grad_()
        expert = self._trained_for(batch.expert)
        with torch.enable_grad(), self._blocks[expert].stored():
            given = replace(batch, x_t_BCFHW=x_t_BCFHW)
            v_BCFHW = transformer.velocity(self.networks[expert], given, self._uncounted[expert])
            prediction = self._prediction(v_BCFHW, batch, expert)
            slope_BCFHW, *_ = torch.autograd.grad(value(prediction), x_t_BCFHW)
        return self.ranks.mean(slope_BCFHW)

    def forward(self, batch: State) -> Prediction:
        """Return the velocity and, with gradients on, the projected hidden states of matched blocks."""
        if batch.expert in self._frozen:
            frozen, call = self._frozen[batch.expert], self._uncounted[batch.expert]
            with torch.no_grad():
                return Prediction(transformer.velocity(frozen, batch, call))
        expert = self._trained_for(batch.expert)
        # ZeRO-3 counts micro-steps in the engine's forward; without it only the last gradient stays (0.19.8)
        call = self.engines[expert] if torch.is_grad_enabled() else self._uncounted[expert]
        v_BCFHW = transformer.velocity(self.networks[expert], batch, call)
        return self._prediction(v_BCFHW, batch, expert)

    def _prediction(self, v_BCFHW: Tensor, batch: State, expert: Expert) -> Prediction:
        """Return the prediction of the expert's last forward pass, with what its blocks kept in it."""
        blocks = self._blocks[expert]
        features, blocks.features = blocks.features, {}
        if self._has_heads:
            features = of_made_patches(features, batch, self.ranks)
        return Prediction(v_BCFHW, features, self.ranks.mean)


def _engine(
    model: nn.Module,
    config: EngineConfig,
    learning_rates: dict[str, float],
    name: str,
) -> Any:
    groups, config = parameter_groups(model, learning_rates, with_fused_adam(config))
    config = without_empty_buckets(config, sum(p.numel() for p in model.parameters() if p.requires_grad))
    if config.on_nvme:
        collectives.log0("starting DeepSpeed's async_io; its first build on a machine takes minutes")
        sizes = [p.numel() for p in model.parameters()]
        config = nvme.to_own_folder(config, sizes, name, collectives.world_size())
    with partition_before_moving(model, config.stage), without_dummy_step():
        engine, *_ = deepspeed.initialize(
            model=model.train(), model_parameters=groups, config=config.for_deepspeed
        )
    skip_nonfinite_steps(engine)
    leave_out_reduction_of_one_rank(engine)
    network = whole_network(model)
    if config.stage == 3:
        pace_fetches(transformer.called_in_turn(network))
    if network is model:  # data_types.buffer_dtype would have cast its tables
        transformer.renew_rope(model, collectives.device())
    return engine
