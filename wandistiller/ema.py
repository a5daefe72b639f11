"""An exponential moving average of the trained weights, kept as their engine keeps its own: sharded, offloaded."""

import torch
from torch import Tensor

from wandistiller.fragments import WEIGHTS, Flat, Trained


class Ema:
    """average <- decay average + (1 - decay) weights after each update of one engine; float32 whatever the engine's dtype.

    It follows the rank's own part of the float32 master weights, on whatever device that is, so it takes 4 bytes a
    parameter beside the 12 of Adam and the weights themselves. Source of the formula: Polyak and Juditsky 1992.
    """

    def __init__(self, trained: Trained, decay: float, start: int):
        """Begin with a copy of the weights.

        Args:
            start: the number of finished steps of the run up to which the average is just the weights.
        """
        self._trained, self._decay, self._start = trained, decay, start
        self._average = [self._weights(flat).float().clone() for flat in trained.flats]

    def _weights(self, flat: Flat) -> Tensor:
        return self._trained.tensors(flat)[WEIGHTS]

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Take in the weights after `done` finished steps of the run; a step that the engine skipped changes nothing."""
        if not self._trained.engine.was_step_applied():  # gradients that were not finite
            return
        for average, flat in zip(self._average, self._trained.flats, strict=True):
            average.lerp_(self._weights(flat).float(), 1 - self._decay if done > self._start else 1.0)

    def of(self, flat: Flat) -> Tensor:
        """The average of what lies in `flat`, laid out as its weights."""
        return self._average[flat.number]
