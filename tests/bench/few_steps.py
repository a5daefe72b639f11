"""Effect of each part of few-step training at equal numbers of the student's updates, in two sampling steps.

    python tests/bench/few_steps.py runs/quickstart                # 40 minutes on one core
    python tests/bench/few_steps.py runs/quickstart --updates 20 consistency

Prints a Markdown table: held-out prompts fully right of 112, squared error to the asked picture, difference
of two seeds (as `evaluate` has them, by diffusers), what is watched in the last 20 updates, and seconds.
"""

import statistics
from pathlib import Path
from typing import Any

from common import ROOT, head, on_cpu, parser, row

on_cpu()

from ranks import metrics
from seeds import scores
from toy_students import run

from wandistiller.utils.files import read_json

STEPS = 2
CONSISTENCY = {"name": "consistency", "edges": STEPS}
DMD2 = {"name": "dmd2", "steps": STEPS, "critic_updates": 2, "critic_lr": 3e-4}
VARIANTS: dict[str, Any] = {
    "consistency": CONSISTENCY,
    "dmd2, c = 1": DMD2 | {"critic_updates": 1},
    "dmd2, c = 2": DMD2,
    "dmd2, c = 5": DMD2 | {"critic_updates": 5},
    "dmd2, c = 2, the critic follows (0.03)": DMD2 | {"critic_follows": 0.03},
    "dmd2, c = 2, critic from the teacher": DMD2 | {"critic_start": "teacher"},
    "dmd2, c = 2, heads (0.03)": DMD2 | {"gan": 0.03},
    "joint: dmd2 by renoise, c = 2, and 100 x consistency": [
        DMD2 | {"sampler": "renoise"},
        {"name": "consistency", "weight": 100},
    ],
}
LR = 1e-4
SHOWN = ("critic_lag", "gradient", "deviation")


def train(name: str, start: Path, updates: int, folder: Path) -> Path:
    """Train one variant; return its output folder."""
    recipe = read_json("ds_configs/recipes/two_steps.json")
    recipe.pop("stages", None)
    output = folder / f"{name.replace(' ', '_').replace(',', '').replace(':', '')}_{updates}"
    recipe |= {
        "student_config": {"init": str(start.resolve())},
        "objective": VARIANTS[name],
        "deepspeed_config": "ds_configs/student/few_step.json",
        "lr": LR,
        "max_steps": updates,
        "save_every": updates,
        "sample_every": updates,
        "sample_steps": 2,
        "output_dir": str(output),
        "cache_dir": str(start.resolve() / "cache") if (start / "cache").is_dir() else str(folder / "cache"),
    }
    return run(recipe, output)


def figures(student: Path, lines: list[dict[str, Any]], steps: int) -> list[str]:
    """Draw the held-out prompts twice and count; `lines` are those of metrics.jsonl."""
    found = scores(student, steps)
    last = [line["watched"] for line in lines[-20:] if "watched" in line]
    watched = [f"{statistics.mean(each[key] for each in last):.2f}" if last else "-" for key in SHOWN]
    seconds = f"{statistics.median(line['seconds'] for line in lines):.2f}" if lines else "-"
    return [str(found.right), f"{found.error:.4f}", f"{found.apart:.3f}", *watched, seconds]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("start", type=Path, help="the output folder of the quick start")
    made.add_argument("names", nargs="*", default=list(VARIANTS))
    made.add_argument("--updates", type=int, default=100)
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench_few_steps")
    given = made.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    heads = ["right, of 112", "error", "two seeds' pictures differ by", "critic's lag", "gradient"]
    head(f"{given.updates} updates", *heads, "deviation", "seconds an update")
    row("none", *figures(given.start / "student", [], STEPS))
    for name in given.names:
        output = train(name, given.start, given.updates, given.folder)
        row(name, *figures(output / "student", metrics(output), STEPS))


if __name__ == "__main__":
    main()
