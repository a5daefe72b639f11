"""Context parallelism: consecutive ranks share each sample, and each computes a part of its tokens.

The ranks of one sequence have the same inputs and the same loss. Engines average gradients over all ranks,
so the transfers here have exact adjoints: the average is then the gradient of the loss itself.
Attention divides its heads instead of its tokens. Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

from wandistiller.distributed import collectives

_degree = 1
_groups: dict[str, dist.ProcessGroup] = {}
"""This rank's group by the type of device that it exchanges tensors of."""
_imagined = False


def share(ranks: int) -> None:
    """Let each `ranks` consecutive ranks share their samples from now on. Collective."""
    global _degree
    _degree, world = ranks, collectives.world_size()
    _groups.clear()
    if ranks == 1:
        return
    first = collectives.rank() // ranks * ranks
    own = collectives.group(list(range(first, first + ranks)))
    _groups.update(dict.fromkeys(("cpu", collectives.device().type), own))
    if dist.get_backend(own) == "nccl":  # which takes no tensors in CPU memory
        by_place = [list(range(i, i + ranks)) for i in range(0, world, ranks)]
        timeout = collectives.COLLECTIVE_TIMEOUT
        _groups["cpu"], _ = dist.new_subgroups_by_enumeration(by_place, timeout, backend="gloo")


@contextmanager
def alone() -> Iterator[None]:
    """Let this rank compute whole sequences within."""
    global _degree
    before, _degree = _degree, 1
    try:
        yield
    finally:
        _degree = before


@contextmanager
def imagined(ranks: int) -> Iterator[None]:
    """Let `ranks` ranks share sequences within, whose exchanges take the memory but move nothing: to plan."""
    global _degree, _imagined
    before, _degree, _imagined = (_degree, _imagined), ranks, True
    try:
        yield
    finally:
        _degree, _imagined = before


def degree() -> int:
    """Return the number of ranks that share a sequence."""
    return _degree


def place() -> int:
    """Return this rank's number among those of its sequence."""
    return collectives.rank() % _degree


def replica(rank: int | None = None) -> int:
    """Return the number of a rank's group, by default this one's: what counts ranks in data parallelism."""
    return (collectives.rank() if rank is None else rank) // _degree


def replicas() -> int:
    """Return the number of groups that share a sequence."""
    return collectives.world_size() // _degree


def part(x: Tensor, dim: int = 1) -> Tensor:
    """Return this rank's part of the tokens."""
    return x if _degree == 1 else x.chunk(_degree, dim)[place()]


def whole(x_BSD: Tensor) -> Tensor:
    """Join the tokens of all ranks of the sequence, on each of them. Collective."""
    if _degree == 1:
        return x_BSD
    parts_NBSD = _exchanged(funcol.all_gather_single, x_BSD[None], 0)
    return parts_NBSD.transpose(0, 1).flatten(1, 2)


def to_heads(x_BSHD: Tensor) -> Tensor:
    """Exchange all heads of this rank's tokens for its share of the heads of all tokens. Collective."""
    parts_NBSHD = x_BSHD.unflatten(2, (_degree, -1)).permute(2, 0, 1, 3, 4)
    return _exchanged(funcol.all_to_all_single, parts_NBSHD, None, None).transpose(0, 1).flatten(1, 2)


def to_tokens(x_BSHD: Tensor) -> Tensor:
    """Undo `to_heads`. Collective."""
    parts_NBSHD = x_BSHD.unflatten(1, (_degree, -1)).transpose(0, 1)
    return _exchanged(funcol.all_to_all_single, parts_NBSHD, None, None).permute(1, 2, 0, 3, 4).flatten(2, 3)


def mean(x: Tensor) -> Tensor:
    """Average over the ranks of the sequence, on each of them. Collective."""
    return x if _degree == 1 else _exchanged(funcol.all_reduce, x, "sum") / _degree


def of_each_replica(x_B: Tensor) -> Tensor:
    """Concatenate equal-shaped tensors of all groups, in their order, on every rank. Collective."""
    of_ranks = collectives.gather_tensor(x_B).unflatten(0, (collectives.world_size(), -1))
    return of_ranks[::_degree].flatten(0, 1)


def _exchanged(collective: Callable[..., Tensor], x: Tensor, *settings: Any) -> Tensor:
    x = x.contiguous()
    if _imagined:
        return torch.cat([x] * (_degree if collective is funcol.all_gather_single else 1))
    return funcol.wait_tensor(collective(x, *settings, _groups[x.device.type]))
