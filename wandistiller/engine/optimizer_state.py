"""An engine's master weights and optimizer state by parameter, for any ZeRO stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from wandistiller.distributed import collectives

WEIGHTS = "weights"


class Fragment(NamedTuple):
    """A run of consecutive elements of one parameter, seen flat."""

    name: str
    """Of the parameter."""
    start: int
    """Of its first element, in the parameter."""
    offset: int
    """And in the tensor that holds it here."""
    numel: int


@dataclass(slots=True)
class Partition:
    """One tensor that the optimizer updates on this rank, and the fragments in it; the rest is padding."""

    number: int
    key: Tensor
    """Its entry in the optimizer's state."""
    parts: list[Fragment]


def is_plain(engine: Any) -> bool:
    """Return whether the optimizer updates the network's own weights: at stage 0 in float32."""
    wrapped = isinstance(engine.optimizer, FP16_Optimizer | FP16_UnfusedOptimizer)
    return engine.zero_optimization_stage() == 0 and not wrapped


class MasterWeights:
    """The master weights of an engine and their optimizer state on this rank.

    Follows deepspeed 0.19.8: stages 1 and 2 cut a group's parameters laid end to end, stage 3 cuts each
    parameter, stage 0 has all on every rank.
    """

    def __init__(self, engine: Any):
        self.engine, self._wrapper = engine, engine.optimizer
        self.stage = engine.zero_optimization_stage()
        self._parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self._parameters.items()}
        # stage 3 keeps the whole shape elsewhere while a parameter is cut up
        self.shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}
        cut = {0: self._whole, 3: self._cut_each}.get(self.stage, self._cut_groups)
        self.flats = [Partition(number, key, parts) for number, (key, parts) in enumerate(cut())]

    def optimizer(self, flat: Partition) -> torch.optim.Optimizer:
        """The optimizer proper that updates `flat`."""
        return self._wrapper if is_plain(self.engine) else self._wrapper.optimizer

    def tensors(self, flat: Partition) -> dict[str, Tensor]:
        """The flat weights and their optimizer state; empty for those on NVMe that are not `opened`."""
        state = self.optimizer(flat).state.get(flat.key, {})
        moments = {kind: value for kind, value in state.items() if torch.is_tensor(value) and value.dim() > 0}
        return {kind: value.view(-1) for kind, value in {WEIGHTS: flat.key.detach(), **moments}.items()}

    def steps(self) -> int | None:
        """Number of updates that the optimizer has counted; None before the first.

        FusedAdam (0.19.8) counts in the last tensor of a group alone, and reads it there.
        """
        states = [self.optimizer(flat).state.get(flat.key, {}) for flat in self.flats]
        return max((int(state["step"]) for state in states if "step" in state), default=None)

    @contextmanager
    def opened(self, flat: Partition, *, changed: bool = False) -> Iterator[None]:
        """Have what lies on NVMe in memory for a while, and write it back if it is `changed`."""
        swapped = self.stage == 3 and self._wrapper._swappable_optimizer_subgroup(flat.number)
        if swapped:
            self._wrapper._optimizer_states_and_gradient_swap_in(flat.number)
        yield
        if swapped and changed:
            self._wrapper._optimizer_states_and_gradient_swap_out(flat.number)
        elif swapped:
            self._wrapper._release_swap_buffers(flat.number)

    def make_state(self, flat: Partition, kinds: list[str], steps: int | None) -> None:
        """Give the optimizer zeros of these kinds for `flat`, as after an update, and a count of `steps`."""
        optimizer = self.optimizer(flat)
        state = optimizer.state[flat.key]
        for kind in kinds:
            if not torch.is_tensor(state.get(kind)) or state[kind].numel() != flat.key.numel():
                state[kind] = torch.zeros_like(flat.key, requires_grad=False)
        if steps is not None:
            from_torch = type(optimizer).__module__.startswith("torch.optim")
            # the kernel of torch's fused Adam reads it (2.13); else it is on the CPU
            device = flat.key.device if optimizer.defaults.get("fused") else "cpu"
            state["step"] = torch.tensor(float(steps), device=device) if from_torch else steps

    def publish(self) -> None:
        """Copy the master weights into the weights that the network computes with. Collective."""
        wrapper = self._wrapper
        if self.stage == 3:
            wrapper.checkpoint_event_prologue()  # cuts up the small parameters that stay whole
            for flat in self.flats:
                with self.opened(flat):
                    wrapper._reassign_or_swap_out_partitioned_parameters(flat.number)
            wrapper.checkpoint_event_epilogue()  # and gathers them again
        elif self.stage > 0:
            wrapper.update_lp_params()
        else:
            for flat in self.flats:
                masters = self.tensors(flat)[WEIGHTS]
                for part in flat.parts:
                    weights = self._parameters[part.name].data
                    weights.copy_(masters.narrow(0, part.offset, part.numel).view(weights.shape))

    def _cut_each(self) -> Iterator[tuple[Tensor, list[Fragment]]]:
        """Stage 3: of each parameter, padded to a multiple of the ranks, an equal run."""
        wrapper = self._wrapper
        for key, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
            parts, offset = [], 0
            for p in parameters:
                each = p.partition_numel()
                start = wrapper._get_param_partition_rank(p) * each
                numel = max(0, min(each, p.ds_numel - start))
                parts.append(Fragment(self._names[id(p)], start, offset, numel))
                offset += each
            yield key, parts

    def _cut_groups(self) -> Iterator[tuple[Tensor, list[Fragment]]]:
        """Stages 1 and 2: of a group's parameters laid end to end, an equal run.

        `_hp_mapping` has other places than these with `round_robin_gradients` (0.19.8).
        """
        w = self._wrapper
        groups = zip(w.round_robin_bit16_groups, w.round_robin_bit16_offsets, strict=True)
        for key, (parameters, offsets) in zip(w.single_partition_of_fp32_groups, groups, strict=True):
            begin, parts = collectives.rank() * key.numel(), []
            for p, offset in zip(parameters, offsets, strict=True):
                first, end = max(offset, begin), min(offset + p.numel(), begin + key.numel())
                if first < end:
                    parts.append(Fragment(self._names[id(p)], first - offset, first - begin, end - first))
            yield key, parts

    def _whole(self) -> Iterator[tuple[Tensor, list[Fragment]]]:
        """Stage 0: everything, in bf16 and fp16 by group, otherwise each parameter by itself."""
        wrapper = self._wrapper
        if isinstance(wrapper, FP16_Optimizer):
            groups = zip(wrapper.fp32_groups_flat, wrapper.fp16_groups, strict=True)
        elif isinstance(wrapper, FP16_UnfusedOptimizer):
            masters, weights = map(chain.from_iterable, (wrapper.fp32_groups, wrapper.fp16_groups))
            groups = ((master, [p]) for master, p in zip(masters, weights, strict=True))
        else:
            groups = ((p, [p]) for p in self._parameters.values())
        for key, parameters in groups:
            offsets = accumulate((p.numel() for p in parameters), initial=0)
            parts = [
                Fragment(self._names[id(p)], 0, offset, p.numel())
                for p, offset in zip(parameters, offsets, strict=False)
            ]
            yield key, parts

    def written(self, flat: Partition) -> list[Fragment]:
        """The parts of `flat` that no other rank has, or that this rank writes for all."""
        shared = self.stage == 0 and flat.number % collectives.world_size() != collectives.rank()
        return [] if shared else [part for part in flat.parts if part.numel]


COUNTERS = ("global_steps", "global_samples", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's loss scalers (0.19.8) that change while they train."""


def read_engine(trained: MasterWeights) -> dict[str, Any]:
    """Return the state of an engine that a checkpoint keeps."""
    engine = trained.engine
    return {
        "steps": trained.steps(),
        "groups": [
            {key: value for key, value in group.items() if key != "params"}
            for group in engine.optimizer.param_groups
        ],
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "scaler": {key: getattr(_scaler(engine), key) for key in SCALER if hasattr(_scaler(engine), key)},
        "shapes": trained.shapes,
        **{key: getattr(engine, key) for key in COUNTERS},
    }


def write_engine(
    trained: MasterWeights, saved: dict[str, Any], changed: set[str], place: int | None = None
) -> None:
    """Restore the state of an engine that `read_engine` returned.

    Args:
        changed: keys of the run's identity that are not as they were; what they decide is the new run's.
        place: updates after which a schedule goes on that is new; None: as many as before.
    """
    engine = trained.engine
    for key in COUNTERS:
        setattr(engine, key, saved[key])
    if "precision" not in changed:
        # a fixed scale is the JSON's, which may be another than before
        if saved["scaler"].keys() >= set(SCALER) <= vars(_scaler(engine)).keys():
            vars(_scaler(engine)).update(saved["scaler"])
    scheduler = engine.lr_scheduler
    if not changed & {"optimizer", "scheduler", "learning_rates", "precision"}:
        for group, values in zip(engine.optimizer.param_groups, saved["groups"], strict=True):
            for key in values.keys() & group.keys() - {"step"}:  # which `make_state` counts
                group[key] = tuple(values[key]) if isinstance(group[key], tuple) else values[key]
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])
    elif scheduler is not None:
        # the new schedule, at the place of the old one
        last = saved["scheduler"]["last_batch_iteration"] if place is None else place - 1
        if last >= 0:
            scheduler.step(last)


def _scaler(engine: Any) -> Any:
    """Owner of the loss scale: from stage 1 on an object of its own, at stage 0 the optimizer."""
    return engine.optimizer.loss_scaler if engine.zero_optimization_stage() > 0 else engine.optimizer
