"""The ranks of a run and the nodes that they are on."""

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
