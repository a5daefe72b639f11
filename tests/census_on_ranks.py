"""Run by test_census.py on N ranks: what is resident in the last step of a real run, beside what was planned."""

import gc
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import ADAM, recipe

from wandistiller import distributed, train
from wandistiller.census import OTHERS, by_owner, census
from wandistiller.check import read_job
from wandistiller.config import RunConfig, read_json
from wandistiller.deepspeed_json import stage
from wandistiller.job import Job
from wandistiller.machine import machine_now
from wandistiller.memory import Bytes
from wandistiller.phase import now
from wandistiller.planner import ENGINE, plan
from wandistiller.trainer import Trainer

STEPS, BUCKET = 2, 1000
NETWORKS = ("AutoencoderKLWan", "UMT5EncoderModel", "WanTransformer3DModel")


def look(seen: list[dict[str, Any]]) -> None:
    """Count, where the last step turns to something else."""
    if not now.what.startswith(f"step {STEPS},"):
        return
    gc.collect()
    objects = gc.get_objects()
    trainer = next(o for o in objects if type(o) is Trainer)
    kinds = Counter(type(o).__name__ for o in objects)
    del objects
    found = census(trainer.teacher, trainer.student)
    seen.append({
        "what": now.what.partition(", ")[2], "owners": by_owner(found.values(), "cpu"),
        "largest other": max((s.nbytes for s in found.values() if s.owner == OTHERS), default=0),
        "networks": {kind: kinds[kind] for kind in NETWORKS},
    })  # fmt: skip


def planned(job: Job) -> dict[str, Any]:
    """Bytes of this rank in training: all the time, and in each turn."""
    phase = plan(job, replace(machine_now(), ranks=distributed.world_size(), ranks_on_node=distributed.world_size()))["train"]
    engine = stage(job.teacher_ds) == 3
    phase.kept["teacher's weights"] += Bytes(host=-ENGINE * engine)
    turns = {"all the time": phase.kept, **phase.turns}
    return {turn: {what: b.host + b.node for what, b in parts.items()} for turn, parts in turns.items()}


def main(folder: Path, wan: Path, student: str, teacher: str) -> None:
    distributed.init("warning")
    ds = read_json(f"ds_configs/student/{student}.json")
    zero = ds["zero_optimization"] | {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    ds = {"zero_optimization": zero, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": ADAM,
          "bf16": {"enabled": True}}  # fmt: skip
    given = recipe(folder, wan, max_steps=STEPS, output_dir=str(folder / student), deepspeed_config=ds,
                   sample_prompts=["a circle"], teacher_dtype="bfloat16",
                   teacher_deepspeed_config=f"ds_configs/teacher/{teacher}.json")  # fmt: skip
    job = read_job(RunConfig(**given), distributed.world_size())
    seen: list[dict[str, Any]] = []
    now.changed = lambda: look(seen)
    train._distil(job)
    now.changed = None
    gc.collect()
    left = [name for o in gc.get_objects() if (name := type(o).__name__) in NETWORKS]
    file = folder / f"{student}_{distributed.rank()}.json"
    file.write_text(json.dumps({"planned": planned(job), "seen": seen, "left": left}))
    distributed.finish()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]), *sys.argv[3:])
