"""Run by test_layouts.py on N ranks: small runs that go on from a checkpoint, of their own or of another layout.

python -m torch.distributed.run --nproc_per_node=2 tests/layouts_on_ranks.py FOLDER WAN RESULTS TASK [TASK ...]

A task is `FROM>TO`: engines `NAME PRECISION`, FROM with `@FOLDER` if its checkpoint lies there already. A task without `>`
makes a checkpoint after 2 steps in FOLDER/NAME_PRECISION_RANKS, and goes on to step 4.
"""

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from curves_on_ranks import TEACHER, engine  # noqa: E402
from recipes import recipe  # noqa: E402

from wandistiller import checkpoint, distributed  # noqa: E402
from wandistiller.batch import Expert  # noqa: E402
from wandistiller.check import read_job  # noqa: E402
from wandistiller.config import RunConfig  # noqa: E402
from wandistiller.prepare import guided_teacher, prepare  # noqa: E402
from wandistiller.train import build_student  # noqa: E402
from wandistiller.trainer import Trainer  # noqa: E402

CUT, END = 2, 4


class Runs:
    """Short runs that share the data and the teacher."""

    def __init__(self, folder: Path, wan: Path):
        self.folder, self.wan, self._shared = folder, wan, None

    def trainer(self, name: str, start: Path | None) -> Trainer:
        """Of a run under the engine `NAME PRECISION`; `start` only makes a blank student, which `load` fills."""
        name, precision = name.split()
        ds = engine(name, precision, self.folder / f"swap_{precision}")
        ds |= {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3}}}
        ema = {} if name == "zero3_nvme" else {"ema": 0.9}
        more = {"deepspeed_config": ds, "output_dir": str(self.folder / "run"), "teacher_deepspeed_config": TEACHER, **ema}
        job = read_job(RunConfig(**recipe(self.folder, self.wan, max_steps=END, **more)), distributed.world_size())
        if self._shared is None:
            data, text, teacher = prepare(job)
            self._shared = data, text, teacher or guided_teacher(job, text)
        return Trainer(job, *self._shared, build_student(job))

    def train(self, trainer: Trainer, first: int, last: int) -> list[float]:
        return [sum(trainer.optimizer_step(step).losses) for step in range(first, last)]

    def result(self, trainer: Trainer, losses: list[float], name: str) -> dict[str, Any]:
        """The losses and what the last weights and averages are."""
        trainer.student.trained[Expert.HIGH_NOISE]
        folder = checkpoint.save(trainer.student, self.folder / "ends" / name, END, {}, keep=1)
        found = {"losses": losses}
        for averaged in (False, True) if trainer.student.averages else (False,):
            state = dict(checkpoint.weights(folder, Expert.HIGH_NOISE, averaged))
            raw = b"".join(state[k].numpy().tobytes() for k in sorted(state))
            found["averaged" if averaged else "weights"] = hashlib.sha256(raw).hexdigest()
        trainer.student.engines.clear()
        gc.collect()
        return found

    def whole(self, name: str) -> dict[str, Any]:
        """Four steps, with a checkpoint after two."""
        trainer = self.trainer(name, None)
        losses = self.train(trainer, 0, CUT)
        checkpoint.save(trainer.student, self.kept(name), CUT, {}, keep=1)
        return self.result(trainer, losses + self.train(trainer, CUT, END), "whole" + name.replace(" ", "_"))

    def kept(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}_{distributed.world_size()}"

    def resumed(self, start: Path, name: str) -> dict[str, Any]:
        """The last two of four steps."""
        trainer = self.trainer(name, start)
        checkpoint.load(trainer.student, start / "checkpoints" / f"step_{CUT:08d}")
        return self.result(trainer, self.train(trainer, CUT, END), f"from_{start.name}_to_{name.replace(' ', '_')}")


def main(folder: Path, wan: Path, results: Path, tasks: list[str]) -> None:
    distributed.init("warning")
    runs, found = Runs(folder, wan), {}
    for task in tasks:
        source, _, target = task.partition(">")
        start = folder / source.partition("@")[2] if "@" in source else runs.kept(source)
        found[task] = runs.resumed(start, target) if target else runs.whole(source)
        distributed.log0("%s: done", task)
    if distributed.rank() == 0:
        results.write_text(json.dumps(found))
    distributed.finish()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4:])
