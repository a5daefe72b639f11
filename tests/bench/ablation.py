"""Effect of each part of the recipe at an equal number of steps, on a small student of the embedded teacher.

    python tests/bench/ablation.py                # 1000 steps each, two at a time: an hour on two CPU cores
    python tests/bench/ablation.py --steps 200 velocity trajectory

Prints a Markdown table: held-out prompts fully right of 112 with 95 % interval, loss of the last 50 steps,
seconds a step.
"""

import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import ROOT, head, on_cpu, parser, row

on_cpu()

from ranks import metrics
from toy_students import PROMPTS, pictures, run

from wandistiller.evaluation.metrics import wilson
from wandistiller.tiny import shapes
from wandistiller.utils.files import read_json

STUDENT = {"ffn_dim": 0.2}  # a quarter of the teacher's parameters
FEATURE = {"name": "feature", "weight": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "random start, velocity": {"student_config": {"init": "random", "ffn_dim": 205}, "objective": "velocity"},
    "velocity": {"objective": "velocity"},
    "velocity + feature": {"objective": ["velocity", FEATURE]},
    "trajectory": {"objective": "trajectory"},
    "velocity + trajectory": {"objective": ["velocity", "trajectory"]},
    "velocity + feature + trajectory": {"objective": ["velocity", FEATURE, "trajectory"]},
    "four layers, velocity": {"student_config": {"num_layers": 4, "ffn_dim": 0.9}, "objective": "velocity"},
}


def train(name: str, steps: int, folder: Path) -> Path:
    """One run; returns its output folder."""
    ds = read_json("ds_configs/student/quickstart.json")
    del ds["activation_checkpointing"]
    ds["bf16"] = {"enabled": True}
    recipe = read_json("ds_configs/recipes/quickstart.json")
    del recipe["teacher_dtype"]
    output = folder / f"{name.replace(' ', '_').replace(',', '')}_{steps}"
    recipe |= {
        "student_config": STUDENT,
        "deepspeed_config": ds,
        "max_steps": steps,
        "save_every": steps,
        "teacher_deepspeed_config": "ds_configs/teacher/replicated.json",
        "sample_every": steps,
        "sample_steps": 2,
        "output_dir": str(output),
        "cache_dir": str(folder / "cache"),
        **VARIANTS[name],
    }
    return run(recipe, output)


def figures(name: str, steps: int, folder: Path) -> tuple[str, ...]:
    """Train, draw the held-out prompts, count."""
    output = train(name, steps, folder)
    right = sum(shapes.fully_right(pictures(output / "student", 0), PROMPTS))
    share, lines = wilson(right, len(PROMPTS)), metrics(output)
    loss = statistics.mean(line.get("losses", {}).get("velocity", line["loss"]) for line in lines[-50:])
    seconds = statistics.median(line["seconds"] for line in lines)
    interval = f"{100 * share.low:.0f} to {100 * share.high:.0f} %"
    return name, f"{right} ({interval})", f"{loss:.4f}", f"{seconds:.2f}"


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", default=list(VARIANTS))
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench_ablation")
    made.add_argument("--at_once", type=int, default=2)
    given = made.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    heads = ("held-out prompts right, of 112", "loss at the end", "seconds a step")
    head(f"{given.steps} steps", *heads)
    with ThreadPoolExecutor(given.at_once) as pool:
        for cells in pool.map(lambda name: figures(name, given.steps, given.folder), given.names):
            row(*cells)


if __name__ == "__main__":
    main()
