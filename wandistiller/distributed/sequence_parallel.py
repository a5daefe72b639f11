"""Context parallelism: consecutive ranks share each sample, and each computes a part of its tokens.

The ranks of one sequence have the same inputs and the same loss. Engines average gradients over all ranks,
so the transfers here have exact adjoints: the average is then the gradient of the loss itself.
Attention divides its heads instead of its tokens. Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from wandistiller.distributed import collectives
from wandistiller.utils.errors import Problem, problem

SHARED = "context_parallel"
"""Setting: the ranks that compute each sample together."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a run as replicas of data parallelism, each of `degree` consecutive ones."""

    degree: int = 1
    """Ranks that share a sequence."""
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Those that share this rank's, by the type of device that they exchange tensors of."""

    @classmethod
    def in_groups_of(cls, degree: int) -> Self:
        """Return the ranks of which each `degree` consecutive ones share their samples. Collective."""
        if degree == 1:
            return cls()
        first = collectives.rank() // degree * degree
        group = collectives.group(list(range(first, first + degree)))
        groups = dict.fromkeys(("cpu", collectives.device().type), group)
        if dist.get_backend(group) == "nccl":  # which takes no tensors in CPU memory
            by_replica = [list(range(i, i + degree)) for i in range(0, collectives.world_size(), degree)]
            timeout = collectives.COLLECTIVE_TIMEOUT
            groups["cpu"], _ = dist.new_subgroups_by_enumeration(by_replica, timeout, backend="gloo")
        return cls(degree, groups)

    @property
    def place(self) -> int:
        """This rank's number among those of its sequence."""
        return collectives.rank() % self.degree

    @property
    def replica(self) -> int:
        return self.replica_of(collectives.rank())

    @property
    def replicas(self) -> int:
        """Number of all replicas: what counts ranks in data parallelism."""
        return collectives.world_size() // self.degree

    def replica_of(self, rank: int) -> int:
        return rank // self.degree

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        return x if self.degree == 1 else x.chunk(self.degree, dim)[self.place]

    def whole(self, x_BSD: Tensor) -> Tensor:
        """Join the tokens of all ranks of the sequence, on each of them. Collective."""
        if self.degree == 1:
            return x_BSD
        parts_NBSD = self._exchanged(funcol.all_gather_single, x_BSD[None], 0)
        return parts_NBSD.transpose(0, 1).flatten(1, 2)

    def to_heads(self, x_BSHD: Tensor) -> Tensor:
        """Exchange all heads of this rank's tokens for its share of the heads of all tokens. Collective."""
        parts_NBSHD = x_BSHD.unflatten(2, (self.degree, -1)).permute(2, 0, 1, 3, 4)
        exchanged_NBSHD = self._exchanged(funcol.all_to_all_single, parts_NBSHD, None, None)
        return exchanged_NBSHD.transpose(0, 1).flatten(1, 2)

    def to_tokens(self, x_BSHD: Tensor) -> Tensor:
        """Undo `to_heads`. Collective."""
        parts_NBSHD = x_BSHD.unflatten(1, (self.degree, -1)).transpose(0, 1)
        exchanged_NBSHD = self._exchanged(funcol.all_to_all_single, parts_NBSHD, None, None)
        return exchanged_NBSHD.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def mean(self, x: Tensor) -> Tensor:
        """Average over the ranks of the sequence, on each of them. Collective."""
        return x if self.degree == 1 else self._exchanged(funcol.all_reduce, x, "sum") / self.degree

    def of_each_replica(self, x_B: Tensor) -> Tensor:
        """Concatenate equal-shaped tensors of all replicas, in their order, on every rank. Collective."""
        of_ranks = collectives.gather_tensor(x_B).unflatten(0, (collectives.world_size(), -1))
        return of_ranks[:: self.degree].flatten(0, 1)

    def _exchanged(self, collective: Callable[..., Tensor], x: Tensor, *settings: Any) -> Tensor:
        return funcol.wait_tensor(collective(x.contiguous(), *settings, self.groups[x.device.type]))


class ImaginedRanks(Ranks):
    """Ranks whose exchanges take the memory but move nothing: to plan."""

    def _exchanged(self, collective: Callable[..., Tensor], x: Tensor, *_: Any) -> Tensor:
        return torch.cat([x.contiguous()] * (self.degree if collective is funcol.all_gather_single else 1))


ALONE = Ranks()
"""Each rank computes whole sequences, of samples of its own."""


def division_problems(
    where: str, number: int, world: int, heads: dict[str, int], patches: dict[tuple[int, int, int], int]
) -> list[Problem]:
    """List what does not divide by `number`, the ranks that share a sequence.

    Args:
        patches: of a sample of (height, width, frames).
    """
    if number <= 1:  # what is no positive number is reported elsewhere
        return []
    rules = [(f"There are {world} rank(s)", world)]
    rules += [(f"{name} has {value} attention heads", value) for name, value in heads.items()]
    for (height, wide, frames), value in patches.items():
        rules.append((f"A sample of {height}x{wide} pixels and {frames} frame(s) has {value} patches", value))
    remedy = "Write a divisor of that, or 1."
    return [problem(where, SHARED, number, f"{what}. {remedy}") for what, value in rules if value % number]


SHARING = "shared_sequences"
"""Attribute of a network with its `Sharing`."""


@dataclass(eq=False)
class Sharing:
    """The ranks that compute a network's sequences at present."""

    ranks: Ranks


@contextmanager
def whole_sequences(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Let this rank compute whole sequences with `networks` within."""
    before = {now: now.ranks for network in networks if (now := getattr(network, SHARING, None))}
    for now in before:
        now.ranks = ALONE
    try:
        yield
    finally:
        for now, ranks in before.items():
            now.ranks = ranks
