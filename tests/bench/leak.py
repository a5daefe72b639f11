"""Resident memory of each rank in a long run: at its end that of step 100, to about a hundredth.

A level is the mean of 50 steps: blocks that the C library caches vary by MiB with checkpoints and pictures.

    python tests/bench/leak.py              # 2,000 steps on two ranks, about 10 minutes on two cores
"""

import tempfile
from pathlib import Path
from statistics import mean

from common import head, parser, row
from ranks import metrics, run, train_words
from recipes import recipe_file
from small_wan import make_wan


def held(folder: Path, steps: int, ranks: int) -> list[list[float]]:
    """Return the GiB of each rank after each step; checkpoints and pictures come every 50 steps."""
    wan = make_wan(folder / "wan", experts=1)
    often = {"save_every": 50, "sample_every": 50, "keep_checkpoints": 1}
    file = recipe_file(folder, wan, max_steps=steps, **often)
    run(train_words(file, ranks), timeout=7200)
    return [line["memory_gib"]["train"]["host"] for line in metrics(folder / "run")]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=2000)
    made.add_argument("--ranks", type=int, default=2)
    args = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = held(Path(folder), args.steps, args.ranks)
    head("step", *(f"rank {rank}, MiB" for rank in range(args.ranks)))
    for step in sorted({1, 10, *range(100, args.steps, max(100, args.steps // 8)), args.steps}):
        row(step, *(f"{1024 * gib:.1f}" for gib in found[step - 1]))
    levels = (
        [mean(of_rank) for of_rank in zip(*found[some], strict=True)]
        for some in (slice(50, 100), slice(-50, None))
    )
    growth = max(last / first - 1 for first, last in zip(*levels, strict=True))
    print(f"growth from steps 51-100 to the last 50: {growth:.2%}")


if __name__ == "__main__":
    main()
