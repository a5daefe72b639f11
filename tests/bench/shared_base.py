"""Planned and measured memory of adapters on one streamed base, with blocks of Wan 14B's sizes.

    python tests/bench/shared_base.py                # on a CPU: three blocks, minutes a row, 10 GB of disk
    python tests/bench/shared_base.py --layers 2 --objectives velocity

Each row is a run in a process of its own, from weights in bf16 in files: MiB of CPU memory that are planned,
and measured at the highest; of these the base as it is stored, once, and the rest: weights outside of blocks,
adapters with gradients and optimizer, libraries. What is left are the blocks that compute, two, and
activations. Ends with 1 if a plan is not within a tenth, or if three blocks or more are left.
"""

import sys
from pathlib import Path

from common import head, on_cpu, parser, row

on_cpu()

import one_base
from planned import measured, predicted


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_shared_base"))
    made.add_argument("--layers", type=int, default=3)
    made.add_argument("--objectives", nargs="+", default=["velocity", "dmd2"])
    args = made.parse_args()
    folder, good = args.folder.absolute(), True
    folder.mkdir(parents=True, exist_ok=True)
    wan = one_base.wan(folder, args.layers)
    head("objective", "planned", "measured", "planned / measured", "stored base", "rest", "left, in blocks")
    for objective in args.objectives:
        given = one_base.run_of(folder, wan, objective)
        plan, found = (max(of(given, 1).values()) for of in (predicted, measured))
        needs = one_base.held(wan, 2 if objective == "dmd2" else 1)
        left = (found * 2**20 - needs.stored - needs.rest) / needs.block
        good = good and 0.9 <= plan / found <= 1.1 and left < 3
        parts = (f"{n / 2**20:.0f}" for n in (needs.stored, needs.rest))
        row(objective, plan, found, f"{plan / found:.3f}", *parts, f"{left:.2f}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
