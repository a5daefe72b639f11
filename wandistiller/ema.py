"""An exponential moving average of the trained weights, kept as their engine keeps its own: sharded, offloaded."""

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from safetensors.torch import load_file, save_file
from torch import Tensor


class Ema:
    """average <- decay average + (1 - decay) weights after each update of one engine; float32 whatever the engine's dtype.

    It follows the rank's own part of the float32 master weights, on whatever device that is, so it takes 4 bytes a
    parameter beside the 12 of Adam and the weights themselves. Source of the formula: Polyak and Juditsky 1992.
    """

    def __init__(self, engine: Any, decay: float, start: int):
        """Begin with a copy of the weights.

        Args:
            start: the number of finished steps of the run up to which the average is just the weights.
        """
        self._engine, self._decay, self._start = engine, decay, start
        self._average = {name: w.detach().float().clone() for name, w in masters(engine).items()}

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Take in the weights after `done` finished steps of the run; a step that the engine skipped changes nothing."""
        if not self._engine.was_step_applied():  # fp16 overflow
            return
        for name, weights in masters(self._engine).items():
            self._average[name].lerp_(weights.float(), 1 - self._decay if done > self._start else 1.0)

    def save(self, folder: Path, rank: int) -> None:
        """Write this rank's part beside the engine's own files."""
        save_file(self._average, file(folder, rank))

    def load(self, folder: Path, rank: int) -> None:
        """Go on from what `save` wrote on as many ranks."""
        for name, saved in load_file(file(folder, rank)).items():
            self._average[name].copy_(saved)


def file(folder: Path, rank: int) -> Path:
    """Where a rank's part lies beside the files of its engine."""
    return folder / f"ema_rank_{rank:05d}.safetensors"


def masters(engine: Any) -> dict[str, Tensor]:
    """This rank's part of the weights that are trained, in the precision that they are trained in.

    From stage 1 on flat by parameter group, keys "0", "1", ...; at stage 0 every parameter by its name.
    """
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage > 0:
        flat = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
        return {str(i): group for i, group in enumerate(flat)}
    names = {parameter: name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    if isinstance(optimizer, FP16_Optimizer):  # bf16 too
        parts = [flat.split([p.numel() for p in group])
                 for flat, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)]  # fmt: skip
    elif isinstance(optimizer, FP16_UnfusedOptimizer):
        parts = optimizer.fp32_groups
    else:
        return {name: parameter.detach() for parameter, name in names.items()}
    pairs = [pair for group in zip(optimizer.fp16_groups, parts, strict=True) for pair in zip(*group, strict=True)]
    return {names[parameter]: part.detach().view(parameter.shape) for parameter, part in pairs}
