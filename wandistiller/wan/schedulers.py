"""Schedulers that a pipeline may have: those of a flow, with the shift under the class's own key."""

import inspect
from typing import Any

import diffusers
from diffusers import SchedulerMixin

FLOW = "flow_prediction"
ROUNDING = 1e-5
"""Of the first noise level, 1, in float32."""


def scheduler_class(name: Any) -> type[SchedulerMixin] | None:
    """Return diffusers' scheduler of this name, if it has one."""
    kind = getattr(diffusers.schedulers, name, None) if isinstance(name, str) else None
    is_one = isinstance(kind, type) and issubclass(kind, SchedulerMixin) and kind is not SchedulerMixin
    return kind if is_one else None


def own_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return all settings that the class of a scheduler_config.json reads, with its defaults.

    diffusers (0.42.1) keeps other keys in a file: those of the class from whose config a scheduler was made.
    """
    parameters = inspect.signature(scheduler_class(config["_class_name"]).__init__).parameters
    return {name: config.get(name, p.default) for name, p in parameters.items() if name != "self"}


def shift_key(config: dict[str, Any]) -> str | None:
    """Return the key under which the class of a scheduler_config.json reads its shift, if it has one."""
    return next((key for key in ("flow_shift", "shift") if key in own_settings(config)), None)


def flow_problem(config: dict[str, Any]) -> tuple[str, str] | None:
    """Return the key for which a scheduler is none of a flow, and what to write there; None for a flow's."""
    settings = own_settings(config)
    if settings.get("use_flow_sigmas") is False:
        return "use_flow_sigmas", "The noise levels of Wan, a flow, fall from 1 to 0. Write true."
    if "use_flow_sigmas" in settings and settings.get("prediction_type", FLOW) != FLOW:
        return "prediction_type", f'Wan predicts the velocity of a flow. Write "{FLOW}".'
    scheduler = scheduler_class(config["_class_name"]).from_config(settings)
    scheduler.set_timesteps(3)
    first, last = (getattr(scheduler, "sigmas", [0.0, 0.0])[i] for i in (0, -1))
    if not (0.9 < first < 1 + ROUNDING and 0 <= last < 0.05 and shift_key(config)):
        remedy = f'UniPCMultistepScheduler, "use_flow_sigmas": true and "prediction_type": "{FLOW}".'
        text = "It has not the noise levels of a flow, from 1 to 0, with a shift. Write"
        return "_class_name", f"{text} {remedy}"
    return None
