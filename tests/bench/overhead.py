"""Samples per CPU second of training, beside a plain PyTorch loop with the same arithmetic, turn by turn.

    python tests/bench/overhead.py                       # one thread, about 6 minutes
    python tests/bench/overhead.py --batch 4 --steps 200
    python tests/bench/overhead.py --wider 4 --batch 4 --steps 15   # experts of 50M, random weights

The plain loop trains the same student on the same batches: diffusers' gradient checkpointing, torch's fused
AdamW, clipped gradients, float32. Its batches lie in memory; the trainer reads them from its cache, draws
noise and sigma, averages over ranks, watches and writes its metrics. Both take turns of a few steps in one
process, so that a busy machine slows both, and their losses must agree. `same` is ZeRO-0 with the teacher in
memory, as the plain loop has it; `streamed` copies the teacher's blocks from CPU memory for each step;
`offloaded` has ZeRO-2's optimizer in CPU memory; in `quickstart` the teacher is under ZeRO-Inference too.
"""

import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, Row, head, on_cpu, parser, row

on_cpu()

from wandistiller.utils import system_memory

system_memory.set_allocators()

import torch
from diffusers import WanTransformer3DModel
from states import state
from torch import Tensor
from trainers import job_of, parts_of, trainer_of

from wandistiller.batch import Batch, padded
from wandistiller.distributed import collectives
from wandistiller.engine.patches import patch_deepspeed
from wandistiller.experts import Expert
from wandistiller.training import trainer as training
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import TINY, read_json
from wandistiller.wan.text_padding import merge_text_padding
from wandistiller.wan.transformer import velocity

CONFIGS = ROOT / "ds_configs"
SETTINGS = {
    "same": ("zero0", "replicated"),
    "streamed": ("zero0", "streamed"),
    "offloaded": ("quickstart", "replicated"),
    "quickstart": ("quickstart", "zero_inference_cpu"),
}
"""Student and teacher JSON; precision, optimizer and batch are the quick start's, with a constant rate."""
TURN = 5
"""Steps in a turn."""


def wider(folder: Path, factor: int) -> Path:
    """Return the tiny teacher, or one `factor` times as wide with random weights, written to `folder`."""
    if factor == 1:
        return TINY["tiny"]
    made = folder / f"wider_{factor}"
    shutil.copytree(TINY["tiny"], made, dirs_exist_ok=True)
    for expert in Expert:
        config = WanTransformer3DModel.load_config(made / expert.value)
        sizes = {key: factor * config[key] for key in ("num_attention_heads", "ffn_dim")}
        torch.manual_seed(0)
        WanTransformer3DModel.from_config(config | sizes).save_pretrained(made / expert.value)
    return made


def recipe(folder: Path, teacher_path: Path, setting: str, batch: int) -> dict[str, Any]:
    """Return the quick start's recipe, with short rollouts."""
    student, teacher = SETTINGS[setting]
    quick = read_json(CONFIGS / "recipes/quickstart.json")
    for key in ("teacher_deepspeed_config", "teacher_dtype"):
        del quick[key]
    ds = read_json(CONFIGS / "student/quickstart.json") | {"train_batch_size": batch}
    del ds["scheduler"]
    ds["zero_optimization"] = read_json(CONFIGS / f"student/{student}.json")["zero_optimization"]
    placed = read_json(CONFIGS / f"teacher/{teacher}.json")
    return quick | {
        "teacher_path": str(teacher_path),
        "output_dir": str(folder / f"{setting}_{batch}"),
        "cache_dir": str(folder / f"cache_{teacher_path.name}"),
        "deepspeed_config": ds,
        "teacher_deepspeed_config": {k: v for k, v in placed.items() if k not in ("bf16", "fp16")},
        "rollout_steps": 2,
        "resume": "never",
    }


class Timer:
    """CPU milliseconds by part."""

    def __init__(self) -> None:
        self.ms: Counter[str] = Counter()

    def __call__(self, part: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run` and add the time of all threads of this process to `part`."""
        began = time.process_time()
        try:
            return run(*args, **kwargs)
        finally:
            self.ms[part] += (time.process_time() - began) * 1e3


class PlainLoop:
    """What one would write without this package."""

    def __init__(self, trainer: Trainer, timer: Timer):
        job, self._timer = trainer.job, timer
        guidance = trainer.teacher.guidance
        self._scales, self._null_1LD = guidance.scales, guidance.null_text_LD[None]
        self._student = WanTransformer3DModel.from_config(job.student_transformer.raw).train()
        self._student.load_state_dict(trainer.student.engine(Expert.HIGH_NOISE).module.state_dict())
        self._student.enable_gradient_checkpointing()
        self._teachers = {
            e: WanTransformer3DModel.from_pretrained(job.folder.path / e.value).eval() for e in Expert
        }
        for model in (self._student, *self._teachers.values()) if job.run.merge_text_padding else ():
            merge_text_padding(model)
        params = job.student_engine.section("optimizer.params")
        self._optimizer = torch.optim.AdamW(self._student.parameters(), fused=True, **params)
        self._clip = job.student_engine.raw["gradient_clipping"]

    def step(self, batch: Batch) -> float:
        """Train on one batch; return the loss."""
        target = self._timer("teacher", self._target, batch)
        v = self._timer("student, forward", velocity, self._student, batch)
        loss = (v - target).square().mean()
        self._timer("student, backward", loss.backward)
        self._timer("optimizer", self._update)
        return loss.item()

    @torch.no_grad()
    def _target(self, batch: Batch) -> Tensor:
        rows = max(batch.conditioning.text_BLD.shape[1], self._null_1LD.shape[1])
        null_BLD = padded(self._null_1LD, rows).expand(len(batch.conditioning.text_BLD), -1, -1)
        both = torch.cat([padded(batch.conditioning.text_BLD, rows), null_BLD])
        twice = (torch.cat([x, x]) for x in (batch.x_t_BCFHW, batch.sigma_B))
        text, null = velocity(self._teachers[batch.expert], state(*twice, both)).chunk(2)
        return null + self._scales[batch.expert] * (text - null)

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()


def time_parts(trainer: Trainer, timer: Timer) -> None:
    """Add up the time of the trainer's parts, under the names of the plain loop's where it has them."""
    parts = {
        "read and draw": (trainer.batches, "noised"),
        "teacher": (type(trainer.teacher), "predict_all"),
        "student, forward": (trainer.student, "predict"),
        "student, backward": (trainer.student, "backward"),
        "optimizer": (trainer.student, "step"),
        "average over ranks": (training, "reduce_over_ranks"),
        "metrics": (trainer.monitor, "record"),
    }
    for part, (owner, name) in parts.items():
        run = getattr(owner, name)
        if isinstance(owner, type):
            setattr(owner, name, lambda self, *args, run=run, part=part: timer(part, run, self, *args))
        else:
            setattr(owner, name, partial(timer, part, run))


def train(trainer: Trainer, steps: range) -> list[float]:
    """Train as `Trainer.train` does between checkpoints; return the losses."""
    losses = []
    for step in steps:
        result = trainer.train_step(step)
        trainer.monitor.record(step + 1, result)
        losses.append(result.loss)
    return losses


def compare(folder: Path, teacher_path: Path, setting: str, batch: int, steps: int) -> tuple[Row, list[Row]]:
    """Train both; return a row of the table, and the rows of its parts."""
    given = recipe(folder, teacher_path, setting, batch)
    trainer, timers = trainer_of(given, parts_of(job_of(given))), (Timer(), Timer())
    trainer.monitor.start(0)
    plain = PlainLoop(trainer, timers[0])
    batches = [trainer.batches.noised(step, 0) for step in range(steps)]
    time_parts(trainer, timers[1])
    losses, turns = ([], []), []
    for first in range(0, steps, TURN):
        turn = range(first, first + TURN)
        if first == TURN:  # the first turn warms up
            for timer in timers:
                timer.ms.clear()
        before = [timer.ms["in all"] for timer in timers]
        losses[0].extend(timers[0]("in all", lambda turn=turn: [plain.step(batches[i]) for i in turn]))
        losses[1].extend(timers[1]("in all", train, trainer, turn))
        turns.append([timer.ms["in all"] - b for timer, b in zip(timers, before, strict=True)])
    ratio = statistics.median(a / b for a, b in turns[1:])
    apart = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    ms = [{part: t / (steps - TURN) for part, t in timer.ms.items()} for timer in timers]
    cells = setting, batch, *(f"{of['in all']:.0f}" for of in ms), f"{ratio:.3f}", f"{apart:.0e}"
    return cells, [(setting, batch, p, f"{ms[0].get(p, 0):.1f}", f"{ms[1][p]:.1f}") for p in ms[1]]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_overhead"))
    made.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    made.add_argument("--batch", nargs="+", type=int, default=[4, 16])
    made.add_argument("--steps", type=int, default=60, help=f"a multiple of {TURN}")
    made.add_argument("--wider", type=int, default=1, help="the teacher's width over the tiny one's")
    args = made.parse_args()
    patch_deepspeed()
    collectives.init("warning")
    pairs = [(setting, batch) for setting in args.settings for batch in args.batch]
    teacher = wider(args.folder, args.wider)
    rows, parts = zip(*(compare(args.folder, teacher, *pair, args.steps) for pair in pairs), strict=True)
    heads = "plain, CPU ms a step", "trainer", "samples a CPU second / plain", "losses apart"
    head("setting", "batch", *heads)
    for cells in rows:
        row(*cells)
    print()
    head("setting", "batch", "part", *heads[:2])
    for cells in (cells for some in parts for cells in some):
        row(*cells)


if __name__ == "__main__":
    main()
