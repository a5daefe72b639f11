"""The quick start's loss curve under every teacher placement, side by side; they are bit-equal.

python tests/bench/placements.py                  # 40 steps each, two ranks, about 8 minutes on two CPU cores
python tests/bench/placements.py --max_steps 700  # the whole quick start, under each of them
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from wandistiller.teacher.strategies import teacher_jsons

PLACEMENTS = [name for name in teacher_jsons() if name != "auto"]


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_placements"))
    made.add_argument("--max_steps", type=int, default=40)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--placements", nargs="+", default=PLACEMENTS)
    args = made.parse_args()
    env = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "DS_ACCELERATOR": "cpu",
        **os.environ,
        "PYTHONPATH": str(ROOT),
    }
    lines = {}
    for name in args.placements:
        output = args.folder / name
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={args.ranks}",
            "-m",
            "wandistiller",
            "train",
            "--recipe",
            "ds_configs/recipes/quickstart.json",
            "--cache_dir",
            str(args.folder / "cache"),
            "--output_dir",
            str(output),
            "--teacher_deepspeed_config",
            f"ds_configs/teacher/{name}.json",
            "--max_steps",
            str(args.max_steps),
            "--sample_steps",
            "2",
            "--resume",
            "never",
        ]
        done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
        if done.returncode:
            sys.exit(f"{name}:\n{done.stderr}")
        lines[name] = [
            json.loads(line) for line in (ROOT / output / "metrics.jsonl").read_text().splitlines()
        ]
        print(f"ran {name}", file=sys.stderr, flush=True)
    losses = {name: [line["loss"] for line in entries] for name, entries in lines.items()}
    first = losses[args.placements[0]]
    shown = sorted({0, 1, *range(0, args.max_steps, max(1, args.max_steps // 10)), args.max_steps - 1})
    print(f"| placement | {' | '.join(f'step {i + 1}' for i in shown)} | same losses | seconds a step |")
    print("|---" * (len(shown) + 3) + "|")
    for name, values in losses.items():
        same = sum(a == b for a, b in zip(values, first, strict=True))
        seconds = statistics.median(line["seconds"] for line in lines[name])
        cells = " | ".join(f"{values[i]:.9f}" for i in shown)
        print(f"| {name} | {cells} | {same} of {len(first)} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
