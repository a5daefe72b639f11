"""What an optimizer step was about: each rank's share of it, put together on all of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from wandistiller import distributed, usage
from wandistiller.batch import Expert
from wandistiller.health import Spent
from wandistiller.objectives import Objective
from wandistiller.stopping import stopping
from wandistiller.usage import Usage

BANDS = 5
"""Equal parts of sigma's line from 0 to 1."""


class Done(NamedTuple):
    """What is left of a micro-step when its gradients are there."""

    loss_TB: Tensor
    sigma_B: Tensor
    expert: Expert


class Learned(NamedTuple):
    """Over the samples of all ranks."""

    losses: list[float]
    """Mean of each term, unweighted."""
    by_sigma: dict[str, float]
    """Mean of the weighted sum in each of BANDS that was drawn from."""
    expert: Expert
    """The last one used."""
    memory: list[Usage]
    """Of each rank."""
    spent: list[Spent]
    """By each rank."""
    asked_to_stop: bool
    """Whether any rank was."""


def by_sigma(loss_N: Tensor, sigma_N: Tensor) -> dict[str, float]:
    """Mean loss of the samples in each band, by its ends; bands without samples are left out."""
    band_N = (sigma_N * BANDS).long().clamp(0, BANDS - 1)
    drawn = sorted(set(band_N.tolist()))
    return {f"{k / BANDS:g}-{(k + 1) / BANDS:g}": loss_N[band_N == k].double().mean().item() for k in drawn}


def together(results: list[Done], spent: Spent, objective: Objective) -> Learned:
    """Means over the global batch, summed in sample order whatever the ranks; and that the experts agree. Collective.

    Args:
        results: of each of this rank's micro-steps M.
        spent: by this rank.
    """
    world, expert = distributed.world_size(), results[-1].expert
    found_MKB = torch.stack([torch.cat([done.loss_TB.float(), done.sigma_B[None]]) for done in results])  # K: terms, sigma
    about = [list(Expert).index(expert), float(stopping.reason is not None), *spent, *usage.read()]
    mine = torch.cat([found_MKB.flatten(), found_MKB.new_tensor(about)])
    all_ranks = distributed.gather_tensor(mine).view(world, -1)
    found_RMKB = all_ranks[:, : found_MKB.numel()].view(world, *found_MKB.shape)
    about_R = all_ranks[:, found_MKB.numel() :].tolist()
    if len({numbers[0] for numbers in about_R}) > 1:
        raise RuntimeError(f"The ranks used different experts: {[numbers[0] for numbers in about_R]}. Please report this.")
    *loss_TN, sigma_N = found_RMKB.permute(2, 1, 0, 3).flatten(1)
    first = 2 + len(spent)
    return Learned(
        losses=[loss_N.double().mean().item() for loss_N in loss_TN],
        by_sigma=by_sigma(objective.total(loss_TN), sigma_N),
        expert=expert,
        memory=[Usage(*map(int, numbers[first:])) for numbers in about_R],
        spent=[Spent(*numbers[2:first]) for numbers in about_R],
        asked_to_stop=any(numbers[1] for numbers in about_R),
    )
