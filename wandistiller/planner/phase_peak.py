"""Peak memory of the phases of a run, from their parts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from wandistiller.engine.zero_memory import Bytes

Parts = dict[str, Bytes]
"""Memory of a rank by its use, in words."""


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """Memory of one phase of a run."""

    kept: Parts
    """Held during the whole phase."""
    alternatives: dict[str, Parts] = field(default_factory=dict)
    """Held one after the other, never together."""

    def peak(self) -> Bytes:
        """The most of each kind of memory; `transient` is part of `device`."""
        return total(self.kept) + _most(total(parts) for parts in self.alternatives.values())

    def at(self, alternative: str) -> Bytes:
        return total(self.kept) + total(self.alternatives.get(alternative, {}))

    def parts(self, kind: Callable[[Bytes], int]) -> dict[str, int]:
        """Bytes of one kind of memory at its peak, by use: all that is kept, and the largest alternative."""
        largest = max(self.alternatives.values(), key=lambda parts: kind(total(parts)), default={})
        uses = self.kept | largest
        return {use: kind(self.kept.get(use, Bytes()) + largest.get(use, Bytes())) for use in uses}


def moments(phases: dict[str, PhasePeak]) -> list[Bytes]:
    """Memory at each moment of the phases: during each alternative, beside what its phase keeps."""
    return [p.at(alternative) for p in phases.values() for alternative in p.alternatives or ("",)]


def total(parts: Parts) -> Bytes:
    return sum(parts.values(), Bytes())


def most(phases: dict[str, PhasePeak]) -> Bytes:
    """The most of each kind of memory in any phase."""
    return _most(phase.peak() for phase in phases.values())


def _most(several: Iterable[Bytes]) -> Bytes:
    all_of = [(b.device + b.transient, 0, b.host, b.node, b.disk, b.pinned) for b in several]
    return Bytes(*map(max, zip(*all_of, strict=True)))
