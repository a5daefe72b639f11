"""How much each of the teacher's blocks matters: what its velocity loses when the block is skipped; a table and a picture."""

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from wandistiller import distributed
from wandistiller.batch import Batch, Expert
from wandistiller.files import atomic, write_json
from wandistiller.objectives import Teacher
from wandistiller.probes import VelocityError, networks

BAR, HEIGHT, MARGIN = 24, 240, 40  # pixels of the picture
ROUNDS = 8


def importance(teacher: Teacher, batches: list[Batch], layers: int, keep: int) -> list[dict[int, float]]:
    """Drop the blocks that are missed least, in rounds, as what a block is worth depends on which others are left. Collective.

    Args:
        teacher: without guidance.
        batches: the same on every rank, of the experts that count.
        keep: blocks left at the end; the blocks to drop are spread over at most `ROUNDS` rounds.
    Returns:
        For each round, and every block then left, the relative velocity error without it and those dropped before; the last
        round holds the blocks that stay. The same on every rank.
    """
    targets, left, rounds = [teacher.velocity(b) for b in batches], list(range(layers)), []
    for to_go in range(min(ROUNDS, layers - keep), -1, -1):
        dropped = set(range(layers)) - set(left)
        scores = distributed.from_rank_0({i: _error_without(teacher, batches, targets, dropped | {i}) for i in left})
        rounds.append(scores)
        drop = -(-(len(left) - keep) // to_go) if to_go else 0
        left = sorted(sorted(left, key=lambda i: (-scores[i], i))[: len(left) - drop])
        distributed.log0("importance: %d blocks left, the least missed: %.4f without it", len(left), min(scores.values()))
    return rounds


def _error_without(teacher: Teacher, batches: list[Batch], targets: list[Tensor], blocks: set[int]) -> float:
    error = VelocityError()
    with ExitStack() as hooks:
        for network, number in product(set(networks(teacher).values()), blocks):
            hooks.callback(network.blocks[number].register_forward_hook(_skip).remove)
        for batch, target_BCFHW in zip(batches, targets, strict=True):
            error.add(batch, teacher.velocity(batch), target_BCFHW)
    return error.relative()


def _skip(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return inputs[0].to(output.device)


def write_importance(folder: Path, rounds: list[dict[int, float]], experts: Iterable[Expert]) -> None:
    """Write importance.json, importance.md and importance.png into `folder`."""
    kept = list(rounds[-1])
    measured = {"experts": [e.value for e in experts], "relative_error_without": rounds, "kept": kept}
    write_json(folder / "importance.json", measured)
    head = ["| block |" + "".join(f" round {n} |" for n in range(1, len(rounds) + 1)) + " kept |",
            "|---" * (len(rounds) + 2) + "|"]  # fmt: skip
    rows = [
        f"| {i} |" + "".join(f" {r[i]:.4f} |" if i in r else " |" for r in rounds) + (" yes |" if i in kept else " no |")
        for i in rounds[0]
    ]
    said = "Relative velocity error of the teacher without a block and all those dropped in earlier rounds, on cached samples."
    with atomic(folder / "importance.md") as temporary:
        temporary.write_text("\n".join([said, "", *head, *rows]) + "\n")
    _draw(folder / "importance.png", list(rounds[0].values()), kept)


def _draw(file: Path, scores: list[float], kept: list[int]) -> None:
    image = Image.new("RGB", (max(360, 2 * MARGIN + BAR * len(scores)), 2 * MARGIN + HEIGHT), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    draw.text((8, 8), "relative velocity error without one block; blue blocks are kept", "black", font)
    for i, score in enumerate(scores):
        left, top = MARGIN + BAR * i, MARGIN + HEIGHT - round(HEIGHT * score / (max(scores) or 1))
        draw.rectangle((left + 2, top, left + BAR - 3, MARGIN + HEIGHT), "steelblue" if i in kept else "lightgrey")
        draw.text((left + 2, top - 13), f"{score:.2f}", "black", font)
        draw.text((left + 6, MARGIN + HEIGHT + 4), str(i), "black", font)
    with atomic(file) as temporary:
        image.save(temporary, format="PNG")
