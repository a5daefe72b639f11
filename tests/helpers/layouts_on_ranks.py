"""Run by test_layouts.py on N ranks: small runs that resume a checkpoint, of their own or another layout.

torchrun --nproc_per_node=2 tests/helpers/layouts_on_ranks.py FOLDER WAN RESULTS TASK [TASK ...]

A task is `FROM>TO`: engines `NAME PRECISION`, FROM with `@FOLDER` if its checkpoint lies there. A task
without `>` makes a checkpoint after 2 steps in FOLDER/NAME_PRECISION_RANKS, and goes on to step 4.
"""

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from curves_on_ranks import TEACHER, engine
from recipes import recipe

from wandistiller.batch import Expert
from wandistiller.checkpoint import checkpointer, loading
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.training.build_student import build_student
from wandistiller.training.prepare import guided_teacher, prepare
from wandistiller.training.trainer import Trainer

CUT, END = 2, 4


class Runs:
    """Short runs that share the data and the teacher."""

    def __init__(self, folder: Path, wan: Path):
        self.folder, self.wan, self._shared = folder, wan, None

    def trainer(self, name: str, start: Path | None) -> Trainer:
        """Return a trainer for `NAME PRECISION`; with `start` a blank student, which `load` fills."""
        name, precision = name.split()
        ds = engine(name, precision, self.folder / f"swap_{precision}")
        ds |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3}}}
        ema = {} if name == "zero3_nvme" else {"ema": 0.9}
        more = {
            "deepspeed_config": ds,
            "output_dir": str(self.folder / "run"),
            "teacher_deepspeed_config": TEACHER,
            **ema,
        }
        job = read_job(
            RunConfig(**recipe(self.folder, self.wan, max_steps=END, **more)), collectives.world_size()
        )
        if self._shared is None:
            data, text, teacher = prepare(job)
            self._shared = data, text, teacher or guided_teacher(job, text)
        return Trainer(job, *self._shared, build_student(job))

    def train(self, trainer: Trainer, first: int, last: int) -> list[float]:
        return [trainer.train_step(step).loss for step in range(first, last)]

    def result(self, trainer: Trainer, losses: list[float], name: str) -> dict[str, Any]:
        """The losses and what the last weights and averages are."""
        folder = checkpointer.save(trainer.student, self.folder / "ends" / name, END, {}, keep=1)
        found = {"losses": losses}
        for averaged in (False, True) if trainer.student.averages else (False,):
            state = dict(loading.read_weights(folder, Expert.HIGH_NOISE, averaged))
            raw = b"".join(state[k].numpy().tobytes() for k in sorted(state))
            found["averaged" if averaged else "weights"] = hashlib.sha256(raw).hexdigest()
        trainer.student.engines.clear()
        gc.collect()
        return found

    def whole(self, name: str) -> dict[str, Any]:
        """Four steps, with a checkpoint after two."""
        trainer = self.trainer(name, None)
        losses = self.train(trainer, 0, CUT)
        checkpointer.save(trainer.student, self.kept(name), CUT, {}, keep=1)
        return self.result(trainer, losses + self.train(trainer, CUT, END), "whole" + name.replace(" ", "_"))

    def kept(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}_{collectives.world_size()}"

    def resumed(self, start: Path, name: str) -> dict[str, Any]:
        """The last two of four steps."""
        trainer = self.trainer(name, start)
        loading.load(trainer.student, start / "checkpoints" / f"step_{CUT:08d}")
        return self.result(
            trainer, self.train(trainer, CUT, END), f"from_{start.name}_to_{name.replace(' ', '_')}"
        )


def main(folder: Path, wan: Path, results: Path, tasks: list[str]) -> None:
    collectives.init("warning")
    runs, found = Runs(folder, wan), {}
    for task in tasks:
        source, _, target = task.partition(">")
        start = folder / source.partition("@")[2] if "@" in source else runs.kept(source)
        found[task] = runs.resumed(start, target) if target else runs.whole(source)
        collectives.log0("%s: done", task)
    if collectives.rank() == 0:
        results.write_text(json.dumps(found))
    collectives.destroy()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
