"""Work in batches that the ranks share: whole batches, so that a result does not depend on their number."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import Ranks
from wandistiller.distributed.shutdown import stopping

T = TypeVar("T")


def batched(items: list[T], length: int) -> list[list[T]]:
    return [items[i : i + length] for i in range(0, len(items), length)]


def own_batches(batches: Sequence[T]) -> Sequence[T]:
    return batches[collectives.rank() :: collectives.world_size()]


def until_stopped(batches: Iterable[T]) -> Iterator[T]:
    for batch in batches:
        if stopping.reason:
            return
        yield batch


def number_of_rounds(batches: Sequence[T], ranks: Ranks) -> int:
    """Return how many of the batches each rank takes at most."""
    return -(-len(batches) // ranks.replicas)


def round_robin(batches: Sequence[T], ranks: Ranks) -> Iterator[tuple[int, T, bool]]:
    """Yield round, batch, and whether it counts, equally often on every rank, so that collectives match.

    A rank without work repeats the last batch, which does not count. Ranks that share a sequence have the
    same batch, which counts on the first of them.
    """
    for number in range(number_of_rounds(batches, ranks)):
        at = number * ranks.replicas + ranks.replica
        yield number, batches[min(at, len(batches) - 1)], ranks.place == 0 and at < len(batches)
