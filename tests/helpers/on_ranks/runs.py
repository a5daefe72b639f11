"""Called on ranks by test_layouts.py and bench/curves.py: short runs under the student JSONs.

An engine is `NAME PRECISION`: a shipped JSON's ZeRO stage and offload, in float32 or bf16.
"""

import gc
import hashlib
from pathlib import Path
from typing import Any

from checkpointed import save
from recipes import ADAM, recipe
from trainers import job_of, parts_of, trainer_of

from wandistiller.checkpoint import loading
from wandistiller.distributed import collectives
from wandistiller.experts import Expert
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import read_json

CUT, END = 1, 3
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3}}
SECTIONS = ("zero_optimization", "activation_checkpointing", "aio", "wandistiller")
"""Sections taken from a shipped JSON."""


def engine_json(engine: str, swap: Path) -> dict[str, Any]:
    """Return a shipped JSON's sections with the shared batch, optimizer and precision."""
    name, precision = engine.split()
    ds = {k: v for k, v in read_json(f"ds_configs/student/{name}.json").items() if k in SECTIONS}
    for section in ds["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = str(swap / precision)
    ds |= {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    return ds | {"optimizer": ADAM, "bf16": {"enabled": precision == "bf16"}}


class Runs:
    """Runs in `folder` that share the data and the teacher."""

    def __init__(self, folder: Path, wan: Path):
        self.folder, self.wan, self.parts = folder, wan, None

    def trainer(self, engine: str, steps: int, *, ema: float | None = None, **sections: Any) -> Trainer:
        values = recipe(
            self.folder,
            self.wan,
            output_dir=str(self.folder / "run"),
            max_steps=steps,
            ema=ema,
            deepspeed_config=engine_json(engine, self.folder / "swap") | sections,
            teacher_deepspeed_config={"zero_optimization": {"stage": 0}},
        )
        self.parts = self.parts or parts_of(job_of(values))
        return trainer_of(values, self.parts)


def train(trainer: Trainer, first: int, last: int) -> list[float]:
    """Train these steps; return their losses."""
    return [trainer.train_step(step).loss for step in range(first, last)]


def curves(folder: Path, wan: Path, steps: int, engines: list[str]) -> dict[str, list[float]]:
    """Return the losses by engine."""
    runs, losses = Runs(folder, wan), {}
    for engine in engines:
        trainer = runs.trainer(engine, steps)
        losses[engine] = train(trainer, 0, steps)
        trainer.student.engines.clear()
        del trainer
        gc.collect()
        collectives.log0("%s: done", engine)
    return losses


def resumed_runs(folder: Path, wan: Path, tasks: list[str]) -> dict[str, dict[str, Any]]:
    """Return by task its losses, and digests of its last weights and averages.

    A task is an engine, for three steps with a checkpoint after one, in `folder`/NAME_PRECISION_RANKS; or
    `FROM>TO`, for the last two steps from the checkpoint of FROM, which is an engine or `@` and a folder.
    """
    runs, results = Runs(folder, wan), {}
    for task in tasks:
        source, _, target = task.partition(">")
        run = source[1:] if source[0] == "@" else f"{source.replace(' ', '_')}_{collectives.world_size()}"
        engine = target or source
        trainer = runs.trainer(engine, END, ema=None if "nvme" in engine else 0.9, scheduler=WARMUP)
        if target:
            loading.load(trainer.learners, folder / run / "checkpoints" / f"step_{CUT:08d}")
            losses = []
        else:
            losses = train(trainer, 0, CUT)
            save(trainer.student, folder / run, CUT)
        losses += train(trainer, CUT, END)
        end = folder / "ends" / f"{run}_to_{target.replace(' ', '_')}_{collectives.world_size()}"
        results[task] = {"losses": losses} | digests(trainer, end)
        trainer.student.engines.clear()
        del trainer
        gc.collect()
        collectives.log0("%s: done", task)
    return results


def digests(trainer: Trainer, folder: Path) -> dict[str, str]:
    """Save a checkpoint; return the sha256 of its weights and, where there are any, averages."""
    checkpoint, hashes = save(trainer.student, folder, END), {}
    for averaged in (False, True) if trainer.student.averages else (False,):
        state = dict(loading.read_weights(checkpoint, Expert.HIGH_NOISE, averaged))
        raw = b"".join(state[name].numpy().tobytes() for name in sorted(state))
        hashes["averaged" if averaged else "weights"] = hashlib.sha256(raw).hexdigest()
    return hashes
