"""One loss curve: every student JSON, one and two ranks, float32 and bf16, against a plain PyTorch loop.

    python tests/bench/curves.py             # 20 steps, all JSONs in ds_configs/student/zero*.json
    python tests/bench/curves.py --steps 5 zero2 zero3

Prints the greatest relative difference from the plain loop in the same precision, and between any two rows.
"""

import tempfile
from pathlib import Path

from common import head, on_cpu, parser, row

on_cpu()

import torch
from on_ranks import runs
from plain import plain_losses
from ranks import STUDENTS, call, runs_here
from recipes import recipe
from small_wan import make_wan

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def greatest(ours: list[float], theirs: list[float]) -> float:
    """Greatest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("names", nargs="*", default=[*filter(runs_here, STUDENTS)])
    made.add_argument("--steps", type=int, default=20)
    given = made.parse_args()
    folder = Path(tempfile.mkdtemp())
    wan = make_wan(folder / "wan")
    engines, curves = [f"{name} {p}" for name in given.names for p in PRECISIONS], {}
    for ranks in (1, 2):
        by_engine = call(runs.curves, folder, wan, given.steps, engines, ranks=ranks)[0]
        curves |= {(engine, ranks): losses for engine, losses in by_engine.items()}
    collectives.init("warning")
    job = read_job(RunConfig(**recipe(folder, wan, output_dir=str(folder / "plain"))), world=1)
    plain = {name: plain_losses(job, given.steps, dtype) for name, dtype in PRECISIONS.items()}
    collectives.destroy()
    head("student JSON", "ranks", *(f"{p}, off plain" for p in PRECISIONS))
    for name in given.names:
        for ranks in (1, 2):
            cells = [f"{greatest(curves[f'{name} {p}', ranks], plain[p]):.1e}" for p in PRECISIONS]
            row(name, ranks, *cells)
    for p in PRECISIONS:
        ours = [c for (key, _), c in curves.items() if key.endswith(p)]
        between = max(greatest(a, b) for a in ours for b in ours)
        print(
            f"{p}: losses {plain[p][0]:.4f} to {plain[p][-1]:.4f} in {given.steps} steps; "
            f"any two rows within {between:.1e}"
        )


if __name__ == "__main__":
    main()
