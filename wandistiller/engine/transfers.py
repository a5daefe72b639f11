"""Bytes that ranks send and fetch in a step, and the path that they take."""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple


class Topology(NamedTuple):
    """The ranks of a run."""

    ranks: int
    ranks_on_node: int
    """On the node with the most."""
    accelerator: bool
    """True if each rank has one; else all of them compute on CPUs."""

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_on_node)


class Transfer(NamedTuple):
    """Bytes that go one way for one call or step."""

    what: str
    nbytes: int
    way: str
    """The rate that limits it: pcie, link, network, memory or disk."""


def ring_transfers(
    what: str, whole: int, topology: Topology, *, within_node: bool = False
) -> Iterator[Transfer]:
    """Transfers of an all-gather or a reduce-scatter of `whole` bytes: each rank sends all but its own part.

    Args:
        within_node: each node by itself; else among all ranks.
    """
    nodes = 1 if within_node else topology.nodes
    ranks = topology.ranks if nodes > 1 else topology.ranks_on_node
    sent = whole * (ranks - 1) // ranks
    if topology.ranks_on_node > 1:
        yield Transfer(what, sent, "link")
    if nodes > 1:
        yield Transfer(f"{what}, between nodes", sent, "network")


def exchange_transfers(what: str, own: int, sharers: int, topology: Topology) -> Iterator[Transfer]:
    """Transfers of an exchange of `own` bytes of each of `sharers` consecutive ranks, to each an equal part.

    All ranks of a node send to other nodes by the same way.
    """
    here = gcd(sharers, topology.ranks_on_node)
    if here > 1:
        yield Transfer(what, own * (here - 1) // sharers, "link")
    if here < sharers:
        sent = own * (sharers - here) // sharers
        yield Transfer(f"{what}, between nodes", topology.ranks_on_node * sent, "network")
