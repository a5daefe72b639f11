"""The few-step recipes over several seeds, one process and one core each: scores with mean and spread.

    bash launch/quickstart.sh                        # their start, runs/quickstart
    python tests/bench/seeds.py                      # four_, two_ and one_step(s).json, three seeds: an hour
    python tests/bench/seeds.py runs/mine.json --seeds 0 1

Draws all 112 held-out prompts twice from the exported folders, by diffusers, in the trained number of steps.
"""

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ablation import ROOT, run  # beside this file; it sets the environment too

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
    import torch

    from wandistiller.evaluation.draw_samples import Sampling, draw, open_pipeline
    from wandistiller.tiny import shapes

    torch.set_num_threads(1)
    pipeline, prompts = open_pipeline(student, torch.float32), shapes.HELD_OUT
    how, right, errors, apart = Sampling(height=64, width=64, steps=steps), 0, [], []
    for i in range(0, len(prompts), 8):
        part = prompts[i : i + 8]
        one, two = (
            draw(pipeline, part, [seed + i + k for k in range(len(part))], how)[:, :, 0] for seed in (0, 112)
        )
        right += sum(shapes.fully_right(one, part))
        errors += shapes.mse_to_prompts(one, part).tolist()
        apart += (one - two).square().flatten(1).mean(1).sqrt().tolist()
    return Scores(right, statistics.mean(errors), statistics.mean(apart))


def train(file: Path, seed: int, folder: Path) -> tuple[Path, float]:
    """Train by a recipe with a seed and a cache for it; return its output folder and minutes of steps."""
    output = folder / f"{file.stem}_{seed}"
    recipe = json.loads(file.read_text()) | {"seed": seed, "output_dir": str(output)}
    run(recipe | {"cache_dir": str(folder / f"cache_{seed}")}, output)
    logs = sorted(output.rglob("metrics.jsonl"))
    seconds = (json.loads(line)["seconds"] for log in logs for line in log.read_text().splitlines())
    return output, sum(seconds) / 60


def steps_of(output: Path) -> int:
    """Return the number of steps that a student was trained for."""
    facts = json.loads((output / "student" / "wandistiller.json").read_text())
    return facts["steps"]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("recipes", nargs="*", type=Path, default=RECIPES)
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench_seeds")
    made.add_argument("--at_a_time", type=int, default=2)
    given = made.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    heads = "right, of 112 | of the teacher's | squared error | two seeds' pictures differ by | minutes"
    print(f"| recipe | seed | steps | {heads} |\n{'|---' * 8}|", flush=True)
    with ThreadPoolExecutor(given.at_a_time) as pool:
        for file in given.recipes:
            runs = list(pool.map(lambda seed, file=file: train(file, seed, given.folder), given.seeds))
            found = []
            for seed, (output, minutes) in zip(given.seeds, runs, strict=True):
                steps = steps_of(output)
                found.append(scores(output / "student", steps))
                print(row(file.stem, str(seed), steps, found[-1], f"{minutes:.1f}"), flush=True)
            means, spreads = (
                [f(column) for column in zip(*found, strict=True)] for f in (statistics.mean, spread)
            )
            print(row(file.stem, "mean", steps, Scores(*means), ""), flush=True)
            print(row(file.stem, "spread", steps, Scores(*spreads), ""), flush=True)


def spread(values: tuple[float, ...]) -> float:
    """Return the standard deviation of a sample."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def row(name: str, seed: str, steps: int, s: Scores, minutes: str) -> str:
    figures = f"{s.right:.1f} | {s.right / TEACHER:.3f} | {s.error:.4f} | {s.apart:.3f}"
    return f"| {name} | {seed} | {steps} | {figures} | {minutes} |"


if __name__ == "__main__":
    main()
