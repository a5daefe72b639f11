"""Run by test_census.py on N ranks: what is resident in the last step of a real run, beside what was planned."""

import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from recipes import ADAM, recipe

from wandistiller import distributed, train
from wandistiller.census import OTHERS, by_owner, census
from wandistiller.check import read_job
from wandistiller.config import RunConfig, read_json
from wandistiller.footprint import activation_bytes
from wandistiller.job import Job
from wandistiller.memory import student_parts, teacher_bytes
from wandistiller.phase import now
from wandistiller.planner import student_network
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
    """Bytes of this rank."""
    ranks, config, ds = distributed.world_size(), job.student_transformer, job.student_ds
    teacher = teacher_bytes(job.folder, job.teacher_ds, ranks)
    parts = student_parts(student_network(job), 1, ds, ranks, accelerator=False)
    tokens = job.folder.tokens(job.size.height, job.size.width, 1)
    return {
        "teacher": teacher.device + teacher.host + teacher.node,
        "student": {name: {"kept": b.device + b.host, "live": b.live} for name, b in parts.items()},
        "activations": activation_bytes(config, ds, tokens, job.batch.micro, accelerator=False),
    }  # fmt: skip


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
