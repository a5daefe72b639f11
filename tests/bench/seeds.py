"""The few-step recipes over several seeds, one process and one core each: scores with mean and spread.

    bash launch/quickstart.sh                        # their start, runs/quickstart
    python tests/bench/seeds.py                      # four_, two_ and one_step(s).json, three seeds: an hour
    python tests/bench/seeds.py runs/mine.json --seeds 0 1

Draws all 112 held-out prompts twice from the exported folders, by diffusers, in the trained number of steps.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import ROOT, head, on_cpu, parser, row

on_cpu()

from ranks import metrics
from toy_students import PROMPTS, pictures, run

from wandistiller.tiny import shapes
from wandistiller.utils.files import read_json

RECIPES = [
    ROOT / "ds_configs" / "recipes" / f"{name}.json" for name in ("four_steps", "two_steps", "one_step")
]
TEACHER = 111
"""Prompts of 112 that the teacher draws right in 40 steps with guidance 1.5 (`evaluate`)."""


class Scores(NamedTuple):
    """What a student's pictures of the held-out prompts are worth."""

    right: int
    """Prompts of which shape, colours and place are right."""
    error: float
    """Mean squared error to the asked picture."""
    apart: float
    """Root mean square difference of two seeds' pictures of a prompt."""


def scores(student: Path, steps: int) -> Scores:
    """Draw the held-out prompts from two seeds each; the first is scored."""
    one, two = (pictures(student, seed, steps=steps) for seed in (0, len(PROMPTS)))
    errors, apart = shapes.mse_to_prompts(one, PROMPTS), (one - two).square().flatten(1).mean(1).sqrt()
    return Scores(sum(shapes.fully_right(one, PROMPTS)), errors.mean().item(), apart.mean().item())


def train(file: Path, seed: int, folder: Path) -> tuple[Path, float]:
    """Train by a recipe with a seed and a cache for it; return its output folder and minutes of steps."""
    output = folder / f"{file.stem}_{seed}"
    recipe = read_json(file) | {"seed": seed, "output_dir": str(output)}
    run(recipe | {"cache_dir": str(folder / f"cache_{seed}")}, output)
    stages = [log.parent for log in output.rglob("metrics.jsonl")]
    return output, sum(line["seconds"] for stage in stages for line in metrics(stage)) / 60


def main() -> None:
    made = parser(__doc__)
    made.add_argument("recipes", nargs="*", type=Path, default=RECIPES)
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench_seeds")
    made.add_argument("--at_a_time", type=int, default=2)
    given = made.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    heads = ("right, of 112", "of the teacher's", "squared error", "two seeds' pictures differ by", "minutes")
    head("recipe", "seed", "steps", *heads)
    with ThreadPoolExecutor(given.at_a_time) as pool:
        for file in given.recipes:
            runs = list(pool.map(lambda seed, file=file: train(file, seed, given.folder), given.seeds))
            found = []
            for seed, (output, minutes) in zip(given.seeds, runs, strict=True):
                steps = read_json(output / "student" / "wandistiller.json")["steps"]
                found.append(scores(output / "student", steps))
                row(file.stem, seed, steps, *figures(found[-1]), f"{minutes:.1f}")
            means, spreads = (
                [f(column) for column in zip(*found, strict=True)] for f in (statistics.mean, spread)
            )
            row(file.stem, "mean", steps, *figures(Scores(*means)), "")
            row(file.stem, "spread", steps, *figures(Scores(*spreads)), "")


def spread(values: tuple[float, ...]) -> float:
    """Return the standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def figures(s: Scores) -> tuple[str, ...]:
    return f"{s.right:.1f}", f"{s.right / TEACHER:.3f}", f"{s.error:.4f}", f"{s.apart:.3f}"


if __name__ == "__main__":
    main()
