"""The quick start's loss curve under every teacher placement, side by side; they are bit-equal.

python tests/bench/placements.py                  # 40 steps each, two ranks, about 8 minutes on two CPU cores
python tests/bench/placements.py --max_steps 700  # the whole quick start, under each of them
"""

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from common import head, parser, row
from ranks import ROOT, TEACHERS, launcher, metrics, run, runs_here


def trained(name: str, folder: Path, steps: int, ranks: int) -> list[dict[str, Any]]:
    """The metrics of the quick start with this teacher JSON."""
    flags = {
        "recipe": "ds_configs/recipes/quickstart.json",
        "cache_dir": folder / "cache",
        "output_dir": folder / name,
        "teacher_deepspeed_config": f"ds_configs/teacher/{name}.json",
        "max_steps": steps,
        "sample_steps": 2,
        "resume": "never",
    }
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    env = {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"), "OMP_WAIT_POLICY": "PASSIVE"}
    run([*launcher(ranks), "-m", "wandistiller", "train", *words], timeout=None, **env)
    print(f"ran {name}", file=sys.stderr, flush=True)
    return metrics(ROOT / folder / name)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_placements"))
    made.add_argument("--max_steps", type=int, default=40)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--placements", nargs="+", default=[*filter(runs_here, TEACHERS)])
    args = made.parse_args()
    lines = {name: trained(name, args.folder, args.max_steps, args.ranks) for name in args.placements}
    losses = {name: [line["loss"] for line in entries] for name, entries in lines.items()}
    first = losses[args.placements[0]]
    shown = sorted({0, 1, *range(0, args.max_steps, max(1, args.max_steps // 10)), args.max_steps - 1})
    head("placement", *(f"step {i + 1}" for i in shown), "same losses", "seconds a step")
    for name, values in losses.items():
        same = sum(a == b for a, b in zip(values, first, strict=True))
        seconds = statistics.median(line["seconds"] for line in lines[name])
        row(name, *(f"{values[i]:.9f}" for i in shown), f"{same} of {len(first)}", f"{seconds:.2f}")


if __name__ == "__main__":
    main()
