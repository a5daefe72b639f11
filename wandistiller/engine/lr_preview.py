"""Learning rates of a run before it begins, by DeepSpeed's own schedules."""

import logging
from bisect import bisect_left

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger

from wandistiller.engine.engine_config import EngineConfig

LEAD = 10
"""Steps beyond the end of a run in which its first learning rate above 0 is looked for."""


class Rates:
    """The learning rate of each step, counted from 1, of the engine of a checked student JSON.

    DeepSpeed's WarmupLR and WarmupDecayLR (0.19.8) give the first two steps `warmup_min_lr`, by default 0:
    one before the schedule begins, and its own first. WarmupCosineLR gives the first step 0, and the second
    `warmup_min_ratio`. Trainers that leave the schedule to DeepSpeed have the same.
    """

    def __init__(self, engine: EngineConfig):
        lr = engine.section("optimizer.params").get("lr", 1e-3)  # DeepSpeed's default
        self._optimizer = torch.optim.AdamW([torch.zeros(1)], lr=lr)
        self._schedule, level = None, logger.level
        if kind := engine.section("scheduler").get("type"):
            logger.setLevel(logging.ERROR)  # it warns of the step before its first
            params = engine.section("scheduler.params")
            self._schedule = getattr(lr_schedules, kind)(self._optimizer, **params)
            logger.setLevel(level)

    def at(self, step: int) -> float:
        """Return the rate of one step; the first must be the first that is asked for."""
        if self._schedule and step > 1:
            self._schedule.step(step - 2)
        return float(self._optimizer.param_groups[0]["lr"])


def steps_without_learning(engine: EngineConfig, max_steps: int) -> tuple[int, int]:
    """Return how many of the first steps have the learning rate 0, and how many of the last.

    The first of them may be up to LEAD more than there are, and the last 0 then.
    """
    rates = Rates(engine)
    first = next((n for n in range(max_steps + LEAD) if rates.at(n + 1) > 0), max_steps + LEAD)
    if first >= max_steps or rates.at(max_steps) > 0:
        return first, 0
    # it fell to 0 once, as WarmupDecayLR does after `total_num_steps`
    end = bisect_left(range(first + 2, max_steps + 1), True, key=lambda step: rates.at(step) == 0)
    return first, max_steps - (first + 1 + end)
