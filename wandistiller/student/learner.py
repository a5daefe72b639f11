"""A network in training, the student or its critic: DeepSpeed engines, one per expert, and their averages."""

import math
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from wandistiller.batch import STUDENT, Prediction, State, concat_batches, split_prediction
from wandistiller.distributed import collectives
from wandistiller.engine import nvme
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.extensions import with_fused_adam
from wandistiller.engine.monitors import Monitors, without_monitors
from wandistiller.engine.optimizer_state import WEIGHTS, MasterWeights, Partition
from wandistiller.engine.workarounds import (
    leave_out_reduction_of_one_rank,
    may_lower_loss_scale,
    pace_fetches,
    partition_before_moving,
    reset_adam_step_cache,
    share_adam_s_time,
    skip_nonfinite_steps,
    wait_seldom,
    without_dummy_step,
    without_empty_buckets,
)
from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.student.trainable import parameter_groups
from wandistiller.utils.errors import ConfigError


class Learner:
    """The networks of one role, each in its own engine."""

    def __init__(
        self,
        networks: dict[Expert, Network],
        config: EngineConfig,
        *,
        learning_rates: dict[str, float] | None = None,
        ema: float | None = None,
        ema_start: int = 0,
        role: str = STUDENT,
        frozen: dict[Expert, Network] | None = None,
    ):
        """Put each network, prepared by `Network.prepare`, into an engine. Collective.

        Args:
            learning_rates: factors by part, as in `parameter_patterns.factor`.
            ema: decay of the average of the weights, which begins after `ema_start` steps.
            role: only the student has the run's monitors.
            frozen: networks of other experts, which do not learn, on the device that they compute on.
        """
        # DeepSpeed multiplies the batch up itself, from ranks, of which several may share a sample
        config = config.without("train_batch_size")
        if config.recompute:  # global to the process
            deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config.for_deepspeed)
        self.networks, self._frozen = networks, frozen or {}
        self.ranks = next(iter(networks.values())).ranks
        self.engines = {}
        for expert, network in networks.items():  # the first engine of the student has the run's monitors
            is_monitored = role == STUDENT and not self.engines
            json = config if is_monitored else without_monitors(config)
            self.engines[expert] = _engine(network, json, learning_rates or {}, f"{role}_{expert.value}")
        self.monitors, *_ = map(Monitors, self.engines.values())
        self.trained = {expert: MasterWeights(engine) for expert, engine in self.engines.items()}
        self._meanwhile: Callable[[], None] | None = None
        optimizers = {id(o): o for t in self.trained.values() for o in map(t.optimizer, t.flats)}
        for optimizer in optimizers.values():
            share_adam_s_time(optimizer)
            optimizer.register_step_pre_hook(self._before_optimizer)
        averaged = {} if ema is None else self.trained
        self._lr, self._may_lower_scale = 0.0, False
        self.averages = {expert: Ema(trained, ema, ema_start) for expert, trained in averaged.items()}

    @property
    def blocks(self) -> list[nn.Module]:
        """Those of the networks that learn and of those that do not."""
        networks = [*self.networks.values(), *self._frozen.values()]
        return [block for network in networks for block in network.blocks]

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
        expert = self._trained_for(batch.expert)
        return self.networks[expert].slope(batch, value, self.engines[expert].module)

    def forward(self, batch: State) -> Prediction:
        """Return the velocity and, with gradients on, the projected hidden states of matched blocks."""
        if batch.expert in self._frozen:
            with torch.no_grad():
                return self._frozen[batch.expert].predict(batch)
        expert = self._trained_for(batch.expert)
        # ZeRO-3 counts micro-steps in the engine's forward; without it only the last gradient stays (0.19.8)
        engine = self.engines[expert]
        call = engine if torch.is_grad_enabled() else engine.module
        return self.networks[expert].predict(batch, call)


class Ema:
    """average <- decay average + (1 - decay) weights after each update of one engine, in float32.

    Each rank averages its own partition of the float32 master weights, on their device: 4 bytes a parameter,
    in addition to Adam's 12 and the weights themselves. Source of the formula: Polyak and Juditsky 1992.
    """

    def __init__(self, trained: MasterWeights, decay: float, start: int):
        """Begin with a copy of the weights.

        Args:
            start: finished steps of the run up to which the average equals the weights.
        """
        self._trained, self._decay, self._start = trained, decay, start
        self._average = [self._weights(flat).float().clone() for flat in trained.flats]

    def _weights(self, flat: Partition) -> Tensor:
        return self._trained.tensors(flat)[WEIGHTS]

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Add the weights after `done` steps of the run; a step that the engine skipped changes nothing."""
        if not self._trained.engine.was_step_applied():  # gradients that were not finite
            return
        for average, flat in zip(self._average, self._trained.flats, strict=True):
            average.lerp_(self._weights(flat).float(), 1 - self._decay if done > self._start else 1.0)

    def of(self, flat: Partition) -> Tensor:
        return self._average[flat.number]


def _engine(network: Network, config: EngineConfig, learning_rates: dict[str, float], name: str) -> Any:
    model = network.trained
    groups, config = parameter_groups(model, learning_rates, with_fused_adam(config))
    config = without_empty_buckets(config, sum(p.numel() for p in model.parameters() if p.requires_grad))
    if config.on_nvme:
        collectives.log0("starting DeepSpeed's async_io; its first build on a machine takes minutes")
        sizes = [p.numel() for p in model.parameters()]
        config = nvme.to_own_folder(config, sizes, name, collectives.world_size())
    with partition_before_moving(model, config.stage), without_dummy_step():
        try:
            engine, *_ = deepspeed.initialize(
                model=model.train(), model_parameters=groups, config=config.for_deepspeed
            )
        except (AssertionError, ValueError) as error:  # the same on every rank
            raise ConfigError(f"{config.where}: DeepSpeed refuses it: {error}") from error
    skip_nonfinite_steps(engine)
    wait_seldom(engine)
    leave_out_reduction_of_one_rank(engine)
    if config.stage == 3:
        pace_fetches(network.config.called_in_turn(network.module))
    return engine
