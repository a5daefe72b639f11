"""Called on ranks by test_census.py: the tensors between micro-steps of a real run, and the plan's."""

import gc
import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes import ADAM, recipe
from tensors import tensor_bytes

from wandistiller.config.job import Job
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.machine import machine_now
from wandistiller.planner.peak_memory import plan
from wandistiller.training import distil
from wandistiller.utils.files import read_json
from wandistiller.utils.logging import current, log

STEPS, BUCKET = 2, 1000
NETWORKS = ("AutoencoderKLWan", "UMT5EncoderModel", "WanTransformer3DModel")


class Watcher(logging.Handler):
    """Counts the bytes of all tensors, and the networks, each time the last step begins to read data."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("doing: ") and current.activity == f"step {STEPS}, reading the data":
            nbytes = tensor_bytes()
            kinds = Counter(type(o).__name__ for o in gc.get_objects())
            self.seen.append({"bytes": nbytes, "networks": {kind: kinds[kind] for kind in NETWORKS}})


def planned(job: Job) -> dict[str, Any]:
    """Bytes of this rank in training: all the time, and in each turn."""
    ranks = collectives.world_size()
    phase = plan(job, replace(machine_now(), ranks=ranks, ranks_on_node=ranks))["train"]
    phase.kept["teacher's weights"] += Bytes(host=-job.teacher.overhead())
    del phase.kept["libraries"]
    turns = {"all the time": phase.kept, **phase.alternatives}
    return {turn: {what: b.host + b.node for what, b in parts.items()} for turn, parts in turns.items()}


def census(folder: Path, wan: Path, student: str, teacher: str) -> dict[str, Any]:
    """Train under these JSONs; return the plan for this rank, what was seen, and the networks left."""
    zero = read_json(f"ds_configs/student/{student}.json")["zero_optimization"]
    zero |= {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0}
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    ds = {"zero_optimization": zero, **batch, "optimizer": ADAM, "bf16": {"enabled": True}}
    values = recipe(
        folder,
        wan,
        max_steps=STEPS,
        output_dir=str(folder / student),
        deepspeed_config=ds,
        sample_prompts=["a circle"],
        teacher_dtype="bfloat16",
        teacher_deepspeed_config=f"ds_configs/teacher/{teacher}.json",
    )
    job = read_job(RunConfig(**values), collectives.world_size())
    watcher = Watcher()
    log.addHandler(watcher)
    log.setLevel(logging.DEBUG)  # the root's handler stays at warnings
    distil._distil(job)
    log.removeHandler(watcher)
    gc.collect()
    left = [name for o in gc.get_objects() if (name := type(o).__name__) in NETWORKS]
    return {"planned": planned(job), "seen": watcher.seen, "left": left}
