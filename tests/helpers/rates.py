"""The learning rate of each step, by DeepSpeed's own schedules."""

import logging

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger

from wandistiller.engine.engine_config import EngineConfig


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
