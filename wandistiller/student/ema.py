"""Exponential moving average of the trained weights, sharded and offloaded as their engine's own."""

import torch
from torch import Tensor

from wandistiller.engine.optimizer_state import WEIGHTS, MasterWeights, Partition


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
