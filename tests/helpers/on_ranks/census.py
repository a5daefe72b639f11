"""Called on ranks by test_census.py: the tensors in the last step of a real run, and the plan's."""

import gc
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import ADAM, recipe
from tensor_owners import OTHERS, by_owner, tensor_owners

from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.machine import machine_now
from wandistiller.planner.peak_memory import plan
from wandistiller.training import distil
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import read_json
from wandistiller.utils.logging import current, log

STEPS, BUCKET = 2, 1000
NETWORKS = ("AutoencoderKLWan", "UMT5EncoderModel", "WanTransformer3DModel")


class Watcher(logging.Handler):
    """Looks at the live tensors each time the last step turns to something else, which it logs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.msg.startswith("doing: ") or not current.activity.startswith(f"step {STEPS},"):
            return
        gc.collect()
        objects = gc.get_objects()
        trainer = next(o for o in objects if type(o) is Trainer)
        kinds = Counter(type(o).__name__ for o in objects)
        del objects
        found = tensor_owners(trainer.teacher, trainer.student)
        self.seen.append(
            {
                "what": current.activity.partition(", ")[2],
                "owners": by_owner(found.values(), "cpu"),
                "largest other": max((s.nbytes for s in found.values() if s.owner == OTHERS), default=0),
                "networks": {kind: kinds[kind] for kind in NETWORKS},
            }
        )


def planned(job: Job) -> dict[str, Any]:
    """Bytes of this rank in training: all the time, and in each turn."""
    ranks = collectives.world_size()
    phase = plan(job, replace(machine_now(), ranks=ranks, ranks_on_node=ranks))["train"]
    phase.kept["teacher's weights"] += Bytes(host=-job.teacher.overhead())
    turns = {"all the time": phase.kept, **phase.alternatives}
    return {turn: {what: b.host + b.node for what, b in parts.items()} for turn, parts in turns.items()}


def census(folder: Path, wan: Path, student: str, teacher: str) -> dict[str, Any]:
    """Train under these JSONs; return the plan for this rank, what was seen, and the networks left."""
    zero = read_json(f"ds_configs/student/{student}.json")["zero_optimization"]
    zero |= {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    ds = {"zero_optimization": zero, **batch, "optimizer": ADAM, "bf16": {"enabled": True}}
    given = recipe(
        folder,
        wan,
        max_steps=STEPS,
        output_dir=str(folder / student),
        deepspeed_config=ds,
        sample_prompts=["a circle"],
        teacher_dtype="bfloat16",
        teacher_deepspeed_config=f"ds_configs/teacher/{teacher}.json",
    )
    job = read_job(RunConfig(**given), collectives.world_size())
    watcher = Watcher()
    log.addHandler(watcher)
    log.setLevel(logging.DEBUG)  # the root's handler stays at warnings
    distil._distil(job)
    log.removeHandler(watcher)
    gc.collect()
    left = [name for o in gc.get_objects() if (name := type(o).__name__) in NETWORKS]
    return {"planned": planned(job), "seen": watcher.seen, "left": left}
