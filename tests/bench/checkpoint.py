"""Time that training waits for a checkpoint, and its memory: ours beside DeepSpeed's own writer.

python tests/bench/checkpoint.py            # two ranks, about 3 minutes on two CPU cores
python tests/bench/checkpoint.py --millions 400
"""

import math
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import head, on_cpu, parser, row

on_cpu()

from new_processes import in_new_processes

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
    """One save by one writer, on this rank of a new process."""
    from engines import learner_of
    from recipes import ADAM
    from small_wan import small_transformer

    from wandistiller.batch import STUDENT
    from wandistiller.checkpoint.checkpointer import Checkpointer
    from wandistiller.distributed import collectives
    from wandistiller.engine.ds_config import load, student_engine
    from wandistiller.engine.patches import patch_deepspeed
    from wandistiller.experts import Expert

    patch_deepspeed()
    collectives.init("warning")
    layers = max(1, round(millions / 16.8))  # of 16.8M parameters each
    model = small_transformer(0, layers, num_attention_heads=8, attention_head_dim=128, ffn_dim=4096)
    ds = {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAM, "bf16": {"enabled": True}}
    ds["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0, **zero}
    student = learner_of(model, student_engine(load(ds), collectives.world_size()))
    (trained,) = student.trained.values()
    for flat in trained.flats:
        trained.make_state(flat, ["exp_avg", "exp_avg_sq"], 1)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if writer == "wandistiller":
        saver = Checkpointer(folder, keep=1)
        waited = timed(lambda: saver.save({STUDENT: student}, 1, {}))
        behind = timed(saver.finish)
    else:
        engine, behind = student.engine(Expert.HIGH_NOISE), 0.0
        waited = timed(lambda: engine.save_checkpoint(str(folder), tag="one"))
    collectives.barrier()
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    found = {"parameters": sum(map(math.prod, trained.shapes.values())) / 1e6, "size": size / MIB}
    found |= {"waited": waited, "behind": behind, "peak": peak_above(base)}
    collectives.destroy()
    return found


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--millions", type=int, default=200, help="parameters of the student, about")
    args = made.parse_args()
    head(*HEAD)
    for case, stage, zero in CASES:
        for writer in WRITERS:
            with tempfile.TemporaryDirectory() as folder:
                found = in_new_processes(measure, stage, zero, writer, args.millions, Path(folder), ranks=2)
            worst = {key: max(of_rank[key] for of_rank in found) for key in found[0]}
            times = (f"{worst[key]:.2f} s" for key in ("waited", "behind"))
            sizes = (f"{worst[key]:.0f} MiB" for key in ("size", "peak"))
            row(f"{worst['parameters']:.0f}M, {case}", writer, *times, *sizes)


if __name__ == "__main__":
    main()
