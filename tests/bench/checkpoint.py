"""How long training waits for a checkpoint, and what memory it takes: ours beside DeepSpeed's own writer.

python tests/bench/checkpoint.py            # two ranks, about 3 minutes on two CPU cores
python tests/bench/checkpoint.py --millions 400
"""

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

from ranks import launcher, run

MIB = 2**20
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = [("zero2_offload", 2, OFFLOAD), ("zero3_offload", 3, OFFLOAD)]
HEAD = ["student", "writer", "training waits", "then behind it", "on disk", "peak above what the rank had"]
WRITERS = ["wandistiller", "deepspeed"]


def peak_above(base: int) -> float:
    """Return the MiB of this process above `base` KiB: `ru_maxrss` only grows, so each writer has its own."""
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024


def timed(work: Callable[[], Any]) -> float:
    from wandistiller.distributed import collectives

    collectives.barrier()
    began = time.monotonic()
    work()
    return time.monotonic() - began


def measure(stage: int, zero: dict[str, Any], writer: str, millions: int, folder: Path) -> dict[str, float]:
    """One save by one writer, on this rank."""
    from recipes import ADAM
    from small_wan import small_transformer

    from wandistiller.batch import Expert
    from wandistiller.checkpoint.checkpointer import Checkpointer
    from wandistiller.distributed import collectives
    from wandistiller.engine import ds_config
    from wandistiller.student.student import Student

    layers = max(1, round(millions / 16.8))  # of 16.8M parameters each
    model = small_transformer(0, layers, num_attention_heads=8, attention_head_dim=128, ffn_dim=4096)
    ds = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    student = Student(
        {Expert.HIGH_NOISE: model}, ds_config.student_engine("here", ds, collectives.world_size())[0]
    )
    (trained,) = student.trained.values()
    for flat in trained.flats:
        trained.make_state(flat, ["exp_avg", "exp_avg_sq"], 1)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if writer == "wandistiller":
        saver = Checkpointer(folder, keep=1)
        waited = timed(lambda: saver.save(student, 1, {}))
        behind = timed(saver.finish)
    else:
        waited, behind = (
            timed(lambda: student.engine(Expert.HIGH_NOISE).save_checkpoint(str(folder), tag="one")),
            0.0,
        )
    collectives.barrier()
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return {
        "parameters": sum(map(_numel, trained.shapes.values())) / 1e6,
        "size": size / MIB,
        "waited": waited,
        "behind": behind,
        "peak": peak_above(base),
    }


def _numel(shape: list[int]) -> int:
    product = 1
    for n in shape:
        product *= n
    return product


def on_rank(case: str, writer: str, millions: int, folder: Path) -> None:
    from wandistiller.distributed import collectives

    collectives.init("warning")
    _, stage, zero = next(c for c in CASES if c[0] == case)
    found = collectives.gather_objects(measure(stage, zero, writer, millions, folder))
    if collectives.rank() == 0:
        worst = {key: max(f[key] for f in found) for key in found[0]}
        (folder / "result.json").write_text(json.dumps(worst))
    collectives.destroy()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--millions", type=int, default=200, help="parameters of the student, about")
    asked.add_argument("--on_rank", nargs=3, help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.on_rank:
        return on_rank(given.on_rank[0], given.on_rank[1], given.millions, Path(given.on_rank[2]))
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for case, *_ in CASES:
        for writer in WRITERS:
            folder = Path(tempfile.mkdtemp())
            words = [
                *launcher(2),
                __file__,
                "--millions",
                str(given.millions),
                "--on_rank",
                case,
                writer,
                str(folder),
            ]
            run([str(w) for w in words], PATH=os.environ["PATH"])
            r = json.loads((folder / "result.json").read_text())
            shutil.rmtree(folder)
            cells = [
                f"{r['parameters']:.0f}M, {case}",
                writer,
                f"{r['waited']:.2f} s",
                f"{r['behind']:.2f} s",
                f"{r['size']:.0f} MiB",
                f"{r['peak']:.0f} MiB",
            ]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
