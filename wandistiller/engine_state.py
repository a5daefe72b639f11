"""What an engine knows beside its tensors, as JSON: counters, learning rates, schedule, loss scale."""

from typing import Any

from wandistiller.fragments import Trained

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What changes in DeepSpeed's loss scalers (0.19.8), wherever they keep it."""


def read_engine(trained: Trained) -> dict[str, Any]:
    """All of it."""
    engine = trained.engine
    flats = trained.flats
    return {
        "optimizer": type(trained.optimizer(flats[0])).__name__ if flats else None,
        "steps": trained.steps(),
        "groups": [_plain(group) for group in engine.optimizer.param_groups],
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "scaler": {key: getattr(_scaler(engine), key) for key in SCALER if hasattr(_scaler(engine), key)},
        "autocast_scaler": scaler.state_dict() if (scaler := _autocast_scaler(engine)) else None,
        "shapes": trained.shapes,
        **{key: getattr(engine, key) for key in COUNTERS},
    }


def write_engine(trained: Trained, saved: dict[str, Any], changed: set[str]) -> None:
    """Let an engine go on from what `read_engine` said.

    Args:
        changed: keys of the run's identity that are not as they were; what they decide is the new run's.
    """
    engine = trained.engine
    for key in COUNTERS:
        setattr(engine, key, saved[key])
    if "precision" not in changed:
        for key, value in saved["scaler"].items():
            if hasattr(_scaler(engine), key):
                setattr(_scaler(engine), key, value)
        if saved["autocast_scaler"] and (scaler := _autocast_scaler(engine)):
            scaler.load_state_dict(saved["autocast_scaler"])
    scheduler = engine.lr_scheduler
    if not changed & {"optimizer", "scheduler", "learning_rates", "precision"}:
        for group, values in zip(engine.optimizer.param_groups, saved["groups"], strict=True):
            for key in values.keys() & group.keys() - {"step"}:  # which `make_state` counts
                group[key] = tuple(values[key]) if isinstance(group[key], tuple) else values[key]
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])
    elif scheduler is not None and saved["scheduler"]:
        scheduler.step(saved["scheduler"]["last_batch_iteration"])  # the new schedule, at the place of the old one


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says beside its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _scaler(engine: Any) -> Any:
    """What keeps the loss scale: from stage 1 on an object of its own, at stage 0 the optimizer."""
    return engine.optimizer.loss_scaler if engine.zero_optimization_stage() > 0 else engine.optimizer


def _autocast_scaler(engine: Any) -> Any:
    return engine.optimizer.torch_autocast_gradscaler if engine.zero_optimization_stage() > 0 else None
