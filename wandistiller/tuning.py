"""Which of the student's weights are trained, and how fast: frozen parts, learning-rate factors, LoRA."""

from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller import wan
from wandistiller.blocks import PROJECTIONS
from wandistiller.config import RunConfig
from wandistiller.parts import any_names, factor, unknown_parts
from wandistiller.problems import problem, unknown_keys

RATES = {"warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"}
"""Keys of DeepSpeed's schedules that are learning rates."""
DEFAULT_RATES = {"WarmupDecayLR": {"warmup_max_lr": 1e-3}, "LRRangeTest": {"lr_range_test_min_lr": 1e-3}}
"""What deepspeed 0.19.8 takes in silence where it does not take the optimizer's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """The recipe key `lora`: only small matrices beside linear layers are trained, W + alpha / rank B A.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 16
    alpha: float | None = None
    """None: the rank, so that the factor is 1."""
    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out"])
    """Parts whose linear layers get one, as in `parts.names_part`."""


def tuning_problems(run: RunConfig, config: dict[str, Any], ds: dict[str, Any]) -> list[str]:
    """What is wrong with the recipe keys `frozen`, `learning_rates`, `lora` and `ema`.

    Args:
        config: the student's transformer config.
        ds: the student's DeepSpeed JSON.
    """
    names = [name for name, _ in wan.skeleton(config).named_parameters()]
    found = unknown_parts("recipe", "frozen", run.frozen or (), names) + _ema_problems(run, ds)
    if all(any_names(run.frozen or (), name) for name in names):
        found.append(problem("recipe", "frozen", run.frozen, "Nothing is left to train; remove a part."))
    found += unknown_parts("recipe", "learning_rates", run.learning_rates or (), [*names, PROJECTIONS])
    for part, value in (run.learning_rates or {}).items():
        if type(value) not in (int, float) or value <= 0:
            found.append(problem("recipe", f"learning_rates.{part}", value, "Write a positive factor; `frozen` stops a part."))
    optimizer = ds.get("optimizer", {})
    if run.learning_rates and "lr" not in optimizer.get("params", {}):
        found.append("recipe: `learning_rates` are factors of `optimizer.params.lr`, which the student's JSON lacks. Write it.")
    if run.learning_rates and optimizer.get("type", "").lower() == "muon":
        found.append("recipe: `learning_rates` go with no Muon, which makes parameter groups of its own. Remove them.")
    return found + (_lora_problems(run, config) if run.lora is not None else [])


def _ema_problems(run: RunConfig, ds: dict[str, Any]) -> list[str]:
    found = []
    if run.ema is not None and not 0 < run.ema < 1:
        found.append(problem("recipe", "ema", run.ema, "Write a decay between 0 and 1, such as 0.999."))
    if run.ema_start and run.ema is None:
        found.append(problem("recipe", "ema_start", run.ema_start, "It needs `ema`; write a decay, such as 0.999."))
    if run.ema_start < 0:
        found.append(problem("recipe", "ema_start", run.ema_start, "Write a step of the run, 0 or more."))
    zero = ds.get("zero_optimization", {})
    if run.ema is not None and zero.get("offload_optimizer", {}).get("device") == "nvme":
        found.append(problem("recipe", "ema", run.ema, "The weights that it averages are on NVMe. Write cpu as "
                             "`zero_optimization.offload_optimizer.device`, or remove `ema`."))  # fmt: skip
    return found


def _lora_problems(run: RunConfig, config: dict[str, Any]) -> list[str]:
    found = unknown_keys("recipe", run.lora, [f.name for f in fields(Lora)], "lora.")
    if not find_spec("peft"):
        found.append("recipe: `lora` needs peft. Run: pip install peft")
    if run.frozen:
        found.append(problem("recipe", "frozen", run.frozen, "With `lora` all but the adapters is frozen; remove it."))
    rank, alpha, targets = (run.lora.get(k, default) for k, default in (("rank", 16), ("alpha", None), ("targets", ["to_q"])))
    if type(rank) is not int or rank < 1:
        found.append(problem("recipe", "lora.rank", rank, "Write a positive integer."))
    if alpha is not None and (type(alpha) not in (int, float) or alpha <= 0):
        found.append(problem("recipe", "lora.alpha", alpha, "Write a positive number, or leave it out for the rank."))
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        found.append(problem("recipe", "lora.targets", targets, 'Write a list of parts, such as ["to_q", "blocks.0-3.ffn"].'))
    else:
        found += unknown_parts("recipe", "lora.targets", targets, _linear(wan.skeleton(config)))
    return found


def _linear(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def add_lora(model: WanTransformer3DModel, lora: Lora, seed: int) -> None:
    """Freeze `model` and put adapters that answer zero at first beside its layers, the same on every rank."""
    from peft import LoraConfig

    targets = [name for name in _linear(model) if any_names(lora.targets, name) and not name.startswith(PROJECTIONS)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha or lora.rank, target_modules=targets))


def adapter_state(model: WanTransformer3DModel) -> dict[str, Tensor]:
    """The adapters' weights under the names that diffusers' loader knows."""
    from peft.utils import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def tune(model: WanTransformer3DModel, frozen: list[str] | None, lora: dict[str, Any] | None, seed: int) -> None:
    """Leave gradients to what the recipe trains: all but the frozen parts, or the adapters alone."""
    if lora is not None:
        add_lora(model, Lora(**lora), seed)
    for name, parameter in model.named_parameters():
        trained = parameter.requires_grad or name.startswith(PROJECTIONS)  # which peft froze with all that is not its own
        parameter.requires_grad_(trained and not any_names(frozen or (), name))


def parameter_groups(
    model: nn.Module, learning_rates: dict[str, float], ds: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The trained parameters by learning-rate factor, 1 first, and `ds` with a schedule for each group.

    DeepSpeed's schedules (0.19.8) go from the group's own rate, or from their own keys, which may be lists by group.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not learning_rates:
        return [{"params": [p for _, p in trained]}], ds
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in trained:
        groups.setdefault(factor(learning_rates, name), []).append(parameter)
    factors = sorted(groups, key=lambda f: (f != 1, f))  # the first group's is the learning rate that is logged
    if schedule := ds.get("scheduler"):
        params = DEFAULT_RATES.get(schedule["type"], {}) | schedule.get("params", {})
        params = {k: [f * v for f in factors] if k in RATES else v for k, v in params.items()}
        ds = ds | {"scheduler": schedule | {"params": params}}
    return [{"params": groups[f], "lr": f * ds["optimizer"]["params"]["lr"]} for f in factors], ds
