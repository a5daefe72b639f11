"""Effect of each part of the recipe at an equal number of steps, on a small student of the embedded teacher.

    python tests/bench/ablation.py                # 1000 steps each, two at a time: an hour on two CPU cores
    python tests/bench/ablation.py --steps 200 velocity trajectory

Prints a Markdown table: held-out prompts fully right of 112 with 95 % interval, loss of the last 50 steps,
seconds a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

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
    ds = json.loads((ROOT / "ds_configs" / "student" / "quickstart.json").read_text())
    del ds["activation_checkpointing"]
    ds["bf16"] = {"enabled": True}
    recipe = json.loads((ROOT / "ds_configs" / "recipes" / "quickstart.json").read_text())
    del recipe["teacher_device_strategy"], recipe["teacher_dtype"]
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


def run(recipe: dict[str, Any], output: Path) -> Path:
    """Write a recipe beside its output folder, and train by it."""
    file = output.with_name(f"{output.name}.json")
    file.write_text(json.dumps(recipe))
    words = [sys.executable, "-m", "wandistiller", "train", "--recipe", file]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{output.name}:\n{done.stderr[-3000:]}")
    return output


def row(name: str, steps: int, folder: Path) -> str:
    """Train, draw the held-out prompts, count."""
    output = train(name, steps, folder)
    import torch

    from wandistiller.evaluation.draw_samples import Sampling, draw, open_pipeline
    from wandistiller.evaluation.metrics import wilson
    from wandistiller.tiny import shapes

    torch.set_num_threads(1)
    pipeline, prompts = open_pipeline(output / "student", torch.float32), shapes.HELD_OUT
    how, right = Sampling(height=64, width=64), 0
    for i in range(0, len(prompts), 8):
        pixels_BCFHW = draw(pipeline, prompts[i : i + 8], list(range(i, i + 8)), how)
        right += sum(shapes.fully_right(pixels_BCFHW[:, :, 0], prompts[i : i + 8]))
    share = wilson(right, len(prompts))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    loss = statistics.mean(line.get("losses", {}).get("velocity", line["loss"]) for line in lines[-50:])
    seconds = statistics.median(line["seconds"] for line in lines)
    interval = f"{100 * share.low:.0f} to {100 * share.high:.0f} %"
    return f"| {name} | {right} ({interval}) | {loss:.4f} | {seconds:.2f} |"


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", default=list(VARIANTS))
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench_ablation")
    made.add_argument("--at_once", type=int, default=2)
    given = made.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(
        f"| {given.steps} steps | held-out prompts right, of 112 | loss at the end | seconds a step |",
        flush=True,
    )
    print("|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        for line in pool.map(lambda name: row(name, given.steps, given.folder), given.names):
            print(line, flush=True)


if __name__ == "__main__":
    main()
