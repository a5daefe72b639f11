"""Result of an optimizer step over all ranks. Fields of StepResult are logged and charted by name."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wandistiller.batch import to_device
from wandistiller.distributed import collectives
from wandistiller.distributed.shutdown import stopping
from wandistiller.experts import Expert
from wandistiller.flow import band_name
from wandistiller.monitoring import memory_usage
from wandistiller.monitoring.alarms import Seconds
from wandistiller.monitoring.memory_usage import Usage
from wandistiller.objectives.objective import Objective
from wandistiller.utils.logging import current

BANDS = 5
"""Number of equal parts of sigma's range from 0 to 1."""
OPTIONAL = {"optional": True}
READING = "reading the data"
"""The activity of a step that waits for storage."""


class MicroStepResult(NamedTuple):
    """Losses of this rank's samples in one micro-step."""

    loss_TB: Tensor
    """float32, unweighted, one row for each term of the objective."""
    sigma_B: Tensor
    """sigma of the states of the first term."""
    expert: Expert
    watched: dict[str, Tensor] = {}
    """Numbers_B by name that show whether training goes well; the same names on every rank."""
    carried_BCFHW: Tensor | None = None
    """States from which the student's samples go on in its next update."""


class Over(NamedTuple):
    """Work that is due by this rank's clock."""

    save: bool = False
    draw: bool = False


class RankReport(NamedTuple):
    """The state of one rank after a step."""

    stop_requested: bool
    over: Over
    seconds: Seconds
    memory: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Numbers of a step over all ranks' samples; fields are keys in metrics.jsonl, but for `ranks`.

    OPTIONAL fields are left out there while they are empty.
    """

    loss: float
    """Mean of the weighted sum of all terms."""
    grad_norm: float | None = None
    """Norm before clipping; None if it is not finite or not known."""
    lr: float = 0.0
    """Learning rate of the first parameter group."""
    expert: Expert
    loss_by_sigma: dict[str, float]
    """Mean loss at noised states, or of another first kind, in each of BANDS that was drawn from."""
    losses: dict[str, float] = field(default_factory=dict, metadata=OPTIONAL)
    """Mean of each term, unweighted, where there are several."""
    loss_scale: float | None = field(default=None, metadata=OPTIONAL)
    skipped: bool = field(default=False, metadata=OPTIONAL)
    """True if the engine made no update, because a gradient was not finite."""
    watched: dict[str, float] = field(default_factory=dict, metadata=OPTIONAL)
    """Means of numbers that show whether training goes well, where the objective has some."""
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Means of the updates of networks beside the student, by role: loss, grad_norm, lr. Each is a key."""
    ranks: list[RankReport]

    def metrics(self) -> dict[str, Any]:
        """Return the fields to be logged, by name."""
        values = {f: getattr(self, f.name) for f in fields(self) if f.name not in ("ranks", "others")}
        return {
            f.name: value.value if isinstance(value, Enum) else value
            for f, value in values.items()
            if value or not f.metadata.get("optional")
        } | self.others

    @property
    def stop_requested(self) -> bool:
        """True if any rank received a request to stop."""
        return any(rank.stop_requested for rank in self.ranks)

    @property
    def over(self) -> Over:
        """Work that is due by the clock of rank 0, so that all ranks agree."""
        return self.ranks[0].over


def by_sigma(loss_N: Tensor, sigma_N: Tensor) -> dict[str, float]:
    """Mean loss of the samples in each band, by its ends; bands without samples are left out."""
    band_N = (sigma_N * BANDS).long().clamp(0, BANDS - 1)
    drawn = sorted(set(band_N.tolist()))
    return {band_name(k / BANDS, (k + 1) / BANDS): loss_N[band_N == k].double().mean().item() for k in drawn}


def reduce_over_ranks(
    micro_steps: list[MicroStepResult], objective: Objective, role: str, over: Over
) -> StepResult:
    """Average over the global batch, in sample order whatever the number of ranks. Collective.

    The engine's numbers, such as the learning rate, are not in the result yet.

    Args:
        role: of the network that learned from the losses.
        over: what is due by this rank's clock.

    Raises:
        RuntimeError: the ranks used different experts.
    """
    expert, watched, names = micro_steps[-1].expert, list(micro_steps[0].watched), objective.weights(role)
    value_KN, sigma_N, ranks = _gathered(micro_steps, expert, over)
    means, terms = [value_N.double().mean().item() for value_N in value_KN], len(names)
    return StepResult(
        loss=objective.total(means[:terms], role),
        losses=dict(zip(names, means[:terms], strict=True)) if terms > 1 else {},
        loss_by_sigma=by_sigma(objective.total_at_first(value_KN[:terms], role), sigma_N),
        watched=dict(zip(watched, means[terms:], strict=True)),
        expert=expert,
        ranks=ranks,
    )


def _gathered(
    micro_steps: list[MicroStepResult], expert: Expert, over: Over
) -> tuple[list[Tensor], Tensor, list[RankReport]]:
    """Return loss_N of each term, then what is watched; sigma_N; each rank's state. Collective."""
    world = collectives.world_size()
    # K: terms, then what is watched, then sigma
    own_MKB = torch.stack(
        [
            torch.cat([m.loss_TB.float(), *(w_B[None] for w_B in m.watched.values()), m.sigma_B[None]])
            for m in micro_steps
        ]
    )
    seconds = Seconds(current.seconds.get(READING, 0.0), sum(current.seconds.values()))
    stop = stopping.reason is not None
    about = [list(Expert).index(expert), *map(float, (stop, *over)), *seconds, *memory_usage.read()]
    this_rank = torch.cat([own_MKB.flatten(), to_device(torch.tensor(about), own_MKB.device)])
    # the host waits for the accelerator here, once a step
    all_ranks = collectives.gather_tensor(this_rank).view(world, -1).cpu()
    values_RMKB = all_ranks[:, : own_MKB.numel()].view(world, *own_MKB.shape)
    about_R = all_ranks[:, own_MKB.numel() :].tolist()
    experts = [numbers[0] for numbers in about_R]
    if len(set(experts)) > 1:
        raise RuntimeError(f"The ranks used different experts: {experts}. Please report this.")
    *value_KN, sigma_N = values_RMKB.permute(2, 1, 0, 3).flatten(1)
    ranks = [
        RankReport(bool(stop), Over(bool(save), bool(draw)), Seconds(data, step), Usage(*map(int, memory)))
        for _, stop, save, draw, data, step, *memory in about_R
    ]
    return value_KN, sigma_N, ranks


def mean_of(results: list[StepResult]) -> dict[str, Any]:
    """Return means of loss, of its terms if several, of the gradient norm, and the last rate; {} of none."""
    if not results:
        return {}
    norms = [r.grad_norm for r in results]
    norm = None if None in norms else sum(norms) / len(norms)
    loss = sum(r.loss for r in results) / len(results)
    terms = {name: sum(r.losses[name] for r in results) / len(results) for name in results[0].losses}
    return {"loss": loss, "grad_norm": norm, "lr": results[-1].lr} | terms
