"""Importance of the teacher's blocks: the velocity error without each of them; a table of them."""

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from torch import Tensor, nn

from wandistiller.batch import Batch, Expert
from wandistiller.distributed import collectives
from wandistiller.student.calibration import velocity_error
from wandistiller.teacher.base import Teacher, local_modules
from wandistiller.utils.files import atomic, write_json

ROUNDS = 8


def importance(teacher: Teacher, batches: list[Batch], layers: int, keep: int) -> list[dict[int, float]]:
    """Drop the least important blocks, in rounds, as importance depends on the others. Collective.

    Args:
        teacher: without guidance.
        batches: equal on every rank.
        keep: number of blocks that stay; the others are dropped over at most `ROUNDS` rounds.
    Returns:
        For each round, by block, the relative velocity error without it and those dropped before; the last
        round has the blocks that stay. Equal on every rank.
    """
    targets, left, rounds = [teacher.velocity(b) for b in batches], list(range(layers)), []
    for to_go in range(min(ROUNDS, layers - keep), -1, -1):
        dropped = set(range(layers)) - set(left)
        errors = {i: _error_without(teacher, batches, targets, dropped | {i}) for i in left}
        scores = collectives.broadcast_object(errors)
        rounds.append(scores)
        drop = -(-(len(left) - keep) // to_go) if to_go else 0
        left = sorted(sorted(left, key=lambda i: (-scores[i], i))[: len(left) - drop])
        message = "importance: %d blocks left, the least important: error %.4f without it"
        collectives.log0(message, len(left), min(scores.values()))
    return rounds


def _error_without(teacher: Teacher, batches: list[Batch], targets: list[Tensor], blocks: set[int]) -> float:
    def skip(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return inputs[0].to(output.device)

    with ExitStack() as hooks:
        for network, number in product(set(local_modules(teacher).values()), blocks):
            hooks.enter_context(network.blocks[number].register_forward_hook(skip))
        return velocity_error(batches, targets, teacher.velocity).relative()


def write_importance(folder: Path, rounds: list[dict[int, float]], experts: Iterable[Expert]) -> None:
    """Write importance.json, which `wandistiller report` charts, and importance.md into `folder`."""
    kept = list(rounds[-1])
    measured = {"experts": [e.value for e in experts], "relative_error_without": rounds, "kept": kept}
    write_json(folder / "importance.json", measured)
    table = [[" block ", *(f" round {n + 1} " for n in range(len(rounds))), " kept "]]
    table.append(["---"] * len(table[0]))
    for i in rounds[0]:
        errors = (f" {r[i]:.4f} " if i in r else " " for r in rounds)
        table.append([f" {i} ", *errors, " yes " if i in kept else " no "])
    title = "Relative velocity error of the teacher without a block and all those dropped in earlier rounds"
    lines = [f"{title}, on cached samples.", "", *(f"|{'|'.join(cells)}|" for cells in table)]
    with atomic(folder / "importance.md") as temporary:
        temporary.write_text("\n".join(lines) + "\n")
