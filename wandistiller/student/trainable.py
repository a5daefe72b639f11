"""The student's trained weights: frozen parts, learning-rate factors, LoRA."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Annotated, Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.student.projections import PROJECTIONS, add_projections
from wandistiller.utils.errors import problem
from wandistiller.utils.parameter_patterns import any_names, factor, unknown_parts
from wandistiller.utils.validation import Count, Positive, check, types_of
from wandistiller.wan import transformer
from wandistiller.wan.structure import ATTENTION_MAPS
from wandistiller.wan.transformer_config import TransformerConfig

RATES = {"warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr"}
"""Keys of DeepSpeed's schedules that are learning rates."""
DEFAULT_RATES = {"WarmupDecayLR": {"warmup_max_lr": 1e-3}, "LRRangeTest": {"lr_range_test_min_lr": 1e-3}}
"""Silent defaults of deepspeed 0.19.8 in schedules that ignore the optimizer's learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """The recipe key `lora`: only low-rank matrices of linear layers are trained, W + alpha / rank B A.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: Count = 16
    alpha: Positive | None = None
    """None: the rank, so that the factor is 1."""
    targets: Annotated[list[str], Field(min_length=1)] = field(default_factory=ATTENTION_MAPS.copy)
    """Parts whose linear layers get an adapter, as in `parameter_patterns.names_part`."""


class TrainingKeys(Protocol):
    """The recipe keys that this module reads, as in `RunConfig`."""

    frozen: list[str] | None
    learning_rates: dict[str, float] | None
    lora: dict[str, Any] | None
    ema: float | None
    ema_start: int
    max_steps: int | None


def tuning_problems(run: TrainingKeys, config: TransformerConfig, engine: EngineConfig) -> list[str]:
    """List the problems of the recipe keys `frozen`, `learning_rates`, `lora` and `ema`.

    Args:
        config: the student's transformer config.
        engine: the student's.
    """
    names = list(transformer.numels(config))
    problems = unknown_parts("recipe", "frozen", run.frozen or (), names) + _ema_problems(run, engine)
    if all(any_names(run.frozen or (), name) for name in names):
        problems.append(problem("recipe", "frozen", run.frozen, "Nothing is left to train; remove a part."))
    problems += unknown_parts("recipe", "learning_rates", run.learning_rates or (), [*names, PROJECTIONS])
    for part in run.learning_rates if run.frozen and run.learning_rates else ():
        named = [name for name in names if part != "*" and any_names([part], name)]
        if named and all(any_names(run.frozen, name) for name in named):
            remedy = f"`frozen` is {run.frozen} and names all of it. Keep one."
            problems.append(problem("recipe", "learning_rates", part, remedy))
    if run.learning_rates and "lr" not in engine.section("optimizer.params"):
        lacking = "which the student's JSON lacks. Write it."
        problems.append(f"recipe: `learning_rates` are factors of `optimizer.params.lr`, {lacking}")
    if run.learning_rates and engine.optimizer == "muon":
        cause = "Muon makes its own parameter groups and takes no `learning_rates`"
        problems.append(f"recipe: {cause}. Remove them.")
    return problems + (_lora_problems(run, config) if run.lora is not None else [])


def _ema_problems(run: TrainingKeys, engine: EngineConfig) -> list[str]:
    problems = []
    if run.ema_start and run.ema is None:
        remedy = "It needs `ema`; write a decay, such as 0.999."
        problems.append(problem("recipe", "ema_start", run.ema_start, remedy))
    elif run.ema is not None and run.max_steps and run.ema_start >= run.max_steps:
        remedy = f"The run ends with step {run.max_steps}, before its average begins. Write less."
        problems.append(problem("recipe", "ema_start", run.ema_start, remedy))
    if run.ema is not None and engine.optimizer_on == "nvme":
        remedy = (
            "The weights that it averages are on NVMe. Write cpu as "
            "`zero_optimization.offload_optimizer.device`, or remove `ema`."
        )
        problems.append(problem("recipe", "ema", run.ema, remedy))
    return problems


def _lora_problems(run: TrainingKeys, config: TransformerConfig) -> list[str]:
    problems, good = check("recipe", run.lora, types_of(Lora), "lora.")
    if not find_spec("peft"):
        problems.append("recipe: `lora` needs peft. Run: pip install peft")
    if run.frozen:
        remedy = "With `lora` all but the adapters is frozen; remove it."
        problems.append(problem("recipe", "frozen", run.frozen, remedy))
    layers = _linear(transformer.meta_transformer(config))
    return problems + unknown_parts("recipe", "lora.targets", Lora(**good).targets, layers)


def _linear(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def add_lora(model: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze `model` and add adapters with zero output at first, equal on every rank."""
    from peft import LoraConfig

    layers = [name for name in _linear(model) if not name.startswith(PROJECTIONS)]
    targets = [name for name in layers if any_names(lora.targets, name)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha or lora.rank, target_modules=targets))


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' weights under the names of diffusers' loader."""
    from peft.utils import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter's name is that of an adapter's weight (peft 0.21)."""
    return ".lora_" in parameter


def set_trainable(
    model: nn.Module,
    frozen: list[str] | None,
    lora: dict[str, Any] | None,
    seed: int,
    matched: Sequence[int] = (),
    teacher_width: int = 0,
) -> None:
    """Enable gradients of what the recipe trains: all but the frozen parts, or the adapters alone.

    Args:
        matched: blocks whose hidden states are compared with the teacher's, of `teacher_width`; each gets a
            projection, which is trained too.
    """
    if lora is not None:
        add_lora(model, Lora(**lora), seed)
    for name, parameter in model.named_parameters():
        # peft froze the projections too
        trained = parameter.requires_grad or name.startswith(PROJECTIONS)
        parameter.requires_grad_(trained and not any_names(frozen or (), name))
    if matched:
        add_projections(model, matched, teacher_width)


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
        params = DEFAULT_RATES.get(schedule["type"], {}) | schedule.get("params", {})
        params = {k: [f * v for f in factors] if k in RATES else v for k, v in params.items()}
        engine = engine.replaced(scheduler=schedule | {"params": params})
    lr = engine.section("optimizer.params")["lr"]
    return [{"params": groups[f], "lr": f * lr} for f in factors], engine
