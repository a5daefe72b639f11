"""The student's trained weights: frozen parts, learning-rate factors, or adapters alone."""

from typing import Any

from torch import nn

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.network.adapters import Lora, lora_problems
from wandistiller.network.config import NetworkConfig
from wandistiller.network.heads import PROJECTIONS
from wandistiller.utils.errors import RECIPE, Problem, problem
from wandistiller.utils.parameter_patterns import any_names, factor, unknown_parts

RATES = {"warmup_min_lr", "warmup_max_lr"}
"""Keys of DeepSpeed's schedules that are learning rates."""


def tuning_problems(run: Any, config: NetworkConfig, engine: EngineConfig) -> list[str]:
    """List the problems of the recipe keys `frozen`, `learning_rates`, `lora` and `ema` of a `RunConfig`."""
    names = list(config.numels)
    problems = unknown_parts("recipe", "frozen", run.frozen or (), names)
    if run.ema is not None and engine.optimizer_on == "nvme":
        remedy = "Write cpu as `zero_optimization.offload_optimizer.device`, or remove `ema`."
        remedy = f"The weights that it averages are on NVMe. {remedy}"
        problems.append(problem("recipe", "ema", run.ema, remedy))
    if all(any_names(run.frozen or (), name) for name in names):
        problems.append(problem("recipe", "frozen", run.frozen, "Nothing is left to train; remove a part."))
    problems += unknown_parts("recipe", "learning_rates", run.learning_rates or (), [*names, PROJECTIONS])
    if run.learning_rates and "lr" not in engine.section("optimizer.params"):
        lacking = "which the student's JSON lacks. Write it."
        text = f"`learning_rates` are factors of `optimizer.params.lr`, {lacking}"
        problems.append(Problem(text, RECIPE, "learning_rates"))
    return problems + (lora_problems(Lora(**run.lora), run.frozen, config) if run.lora is not None else [])


def parameter_groups(
    model: nn.Module, learning_rates: dict[str, float], engine: EngineConfig
) -> tuple[list[dict[str, Any]], EngineConfig]:
    """Group the trained parameters by learning-rate factor, 1 first; add a schedule for each to the JSON.

    DeepSpeed's schedules (0.19.8) use the group's own rate, or their own keys, which may be lists by group.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not learning_rates:
        return [{"params": [p for _, p in trained]}], engine
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in trained:
        groups.setdefault(factor(learning_rates, name), []).append(parameter)
    factors = sorted(groups, key=lambda f: (f != 1, f))  # the first group's learning rate is logged
    if schedule := engine.section("scheduler"):
        params = schedule.get("params", {})
        params = {k: [f * v for f in factors] if k in RATES else v for k, v in params.items()}
        engine = engine.replaced(scheduler=schedule | {"params": params})
    lr = engine.section("optimizer.params")["lr"]
    return [{"params": groups[f], "lr": f * lr} for f in factors], engine
