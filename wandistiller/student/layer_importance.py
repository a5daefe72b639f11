"""Importance of the teacher's blocks: the velocity error without each of them; a table of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.data.tensor_cache import Measured, batches_digest
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.experts import Expert
from wandistiller.student.calibration import velocity_error
from wandistiller.teacher.base import Teacher, local_modules
from wandistiller.utils.files import digest, write_json

ROUNDS = 8


def importance(
    teacher: Teacher, batches: list[Batch], layers: int, keep: int, measured: Measured | None = None
) -> list[dict[int, float]]:
    """Drop the least important blocks, in rounds, as importance depends on the others. Collective.

    Args:
        teacher: without guidance.
        batches: equal on every rank.
        keep: number of blocks that stay; the others are dropped over at most `ROUNDS` rounds.
    Returns:
        For each round, by block, the relative velocity error without it and those dropped before; the last
        round has the blocks that stay. Equal on every rank.
    """
    measured, left, rounds = measured or Measured(None), list(range(layers)), []
    numbers = [layers]  # of blocks at the start of each round; each of them is left out once in it
    for to_go in range(min(ROUNDS, layers - keep), 0, -1):
        numbers.append(numbers[-1] + -(numbers[-1] - keep) // to_go)
    progress = Progress("importance of blocks", (1 + sum(numbers)) * len(batches), "call")
    velocity, same = progress.counting(teacher.velocity), batches_digest(batches)
    targets = []
    for batch in batches:
        collectives.raise_if_stop_requested()
        targets.append(velocity(batch))

    def error_without(blocks: set[int]) -> Tensor:
        with _skipped(teacher, blocks):
            return torch.tensor(velocity_error(batches, targets, velocity).relative(), dtype=torch.float64)

    for following in [*numbers[1:], keep]:
        dropped = set(range(layers)) - set(left)
        scores = {}
        for i in left:
            name, before = digest(same, sorted(dropped | {i})), progress.done
            scores[i] = measured.of(name, lambda i=i, dropped=dropped: error_without(dropped | {i})).item()
            if progress.done == before:
                progress.skip(len(batches))
        rounds.append(scores)
        message = "importance: without the least important of %d blocks the error is %.4f"
        collectives.log0(message, len(left), min(scores.values()))
        left = sorted(sorted(left, key=lambda i: (-scores[i], i))[:following])
    return rounds


@contextmanager
def _skipped(teacher: Teacher, blocks: set[int]) -> Iterator[None]:
    """Let hidden states pass these blocks unchanged. What places or fetches weights are hooks, which stay."""
    skipped = [network.blocks[number] for network in local_modules(teacher) for number in blocks]
    before = [vars(block).get("forward") for block in skipped]  # compiled blocks have one of their own
    for block in skipped:
        block.forward = lambda hidden_states_BSD, *_: hidden_states_BSD
    try:
        yield
    finally:
        for block, forward in zip(skipped, before, strict=True):
            del block.forward
            if forward:
                block.forward = forward


def write_importance(folder: Path, rounds: list[dict[int, float]], experts: Iterable[Expert]) -> None:
    """Write importance.json, which `wandistiller report` charts, into `folder`."""
    measured = {"experts": [e.value for e in experts], "relative_error_without": rounds}
    measured["kept"] = list(rounds[-1])
    write_json(folder / "importance.json", measured)
