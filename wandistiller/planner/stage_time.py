"""Time of one kind of work of a step, from what it computes and moves, at given rates."""

from collections import Counter
from typing import NamedTuple

from wandistiller.engine.transfers import Transfer
from wandistiller.planner.hardware_rates import Rates


class StageTime(NamedTuple):
    """One kind of work of an optimizer step on one rank."""

    what: str
    times: int
    """Repetitions in one step."""
    tflop: float
    """10^12 operations of each."""
    tflops: float
    """10^12 operations a second at which they are done."""
    moves: tuple[Transfer, ...]
    """Transfers at the same time."""
    waits_for: tuple[Transfer, ...] = ()
    """Transfers in each repetition during which nothing is computed."""

    def computing(self) -> float:
        """Seconds of arithmetic, of all repetitions."""
        return self.times * self.tflop / self.tflops

    def moving(self, rates: Rates) -> float:
        """Seconds of the slowest way of what moves meanwhile, of all repetitions."""
        return self.times * _slowest(self.moves, rates)

    def waiting(self, rates: Rates) -> float:
        """Seconds in which nothing is computed, of all repetitions."""
        alone = sum(_slowest((one,), rates) for one in self.waits_for)  # one after the other
        return max(0.0, self.moving(rates) - self.computing()) + self.times * alone

    def seconds(self, rates: Rates) -> float:
        """Least seconds."""
        return self.computing() + self.waiting(rates)


def _slowest(transfers: tuple[Transfer, ...], rates: Rates) -> float:
    seconds: Counter[str] = Counter()
    for one in transfers:
        seconds[one.way] += one.nbytes / (1e9 * getattr(rates, one.way))
    return max(seconds.values(), default=0.0)
