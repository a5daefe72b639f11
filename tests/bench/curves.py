"""One loss curve: every student JSON, on one and two ranks, in float32 and bf16, against a plain PyTorch loop.

    python tests/bench/curves.py             # 20 steps, all JSONs in ds_configs/student/zero*.json
    python tests/bench/curves.py --steps 5 zero2 zero3

Prints the greatest relative difference of a loss from the plain loop's in the same precision, and between any two rows.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

import torch  # noqa: E402
from plain import plain_losses  # noqa: E402
from ranks import ROOT, has_async_io, launcher, run  # noqa: E402
from recipes import recipe  # noqa: E402
from small_wan import make_wan  # noqa: E402

from wandistiller import distributed  # noqa: E402
from wandistiller.check import read_job  # noqa: E402
from wandistiller.config import RunConfig  # noqa: E402

PRECISIONS = {"float32": torch.float32, "bf16": torch.bfloat16}


def greatest(ours: list[float], theirs: list[float]) -> float:
    """Greatest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    shipped = sorted(p.stem for p in (ROOT / "ds_configs" / "student").glob("zero*.json"))
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=[n for n in shipped if n != "zero3_nvme" or has_async_io()])
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp())
    wan = make_wan(folder / "wan")
    curves = {}
    for ranks in (1, 2):
        words = [*launcher(ranks), ROOT / "tests" / "curves_on_ranks.py", folder, wan, given.steps, folder / "r.json"]
        run([*map(str, words), *given.names])
        curves |= {(key, ranks): losses for key, losses in json.loads((folder / "r.json").read_text()).items()}
    distributed.init("warning")
    job = read_job(RunConfig(**recipe(folder, wan, output_dir=str(folder / "plain"))), world=1)
    plain = {name: plain_losses(job, given.steps, dtype) for name, dtype in PRECISIONS.items()}
    distributed.finish()
    print(f"| student JSON | ranks | {' | '.join(f'{p}, off plain' for p in PRECISIONS)} |\n|---|---|---|---|")
    for name in given.names:
        for ranks in (1, 2):
            cells = [f"{greatest(curves[f'{name} {p}', ranks], plain[p]):.1e}" for p in PRECISIONS]
            print(f"| {name} | {ranks} | {' | '.join(cells)} |")
    for p in PRECISIONS:
        ours = [c for (key, _), c in curves.items() if key.endswith(p)]
        between = max(greatest(a, b) for a in ours for b in ours)
        print(f"{p}: losses {plain[p][0]:.4f} to {plain[p][-1]:.4f} in {given.steps} steps; any two rows within {between:.1e}")


if __name__ == "__main__":
    main()
