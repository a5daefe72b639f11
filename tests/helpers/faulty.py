"""The command line with a fault put into the package on purpose: FAULT, then the command's words.

`sent` leaves out what is sent to the GPU, `locked` locks no pages of a streamed teacher, `kept` keeps the
batches of a step too long; `none` changes nothing. OUTPUT/in_tensors.json has the bytes in tensors on the GPU
before the first step and after each.
"""

import gc
import sys
from typing import Any

from wandistiller import flow
from wandistiller.cli.main import command
from wandistiller.data import cached_dataset
from wandistiller.distributed.device import held_memory
from wandistiller.teacher.loading import Arena
from wandistiller.training.rollouts import RollOuts
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import write_json


def put_in(fault: str) -> None:
    if fault == "sent":
        flow.to_device = cached_dataset.to_device = lambda value, _: value
    if fault == "locked":
        Arena.lock = lambda _: None
    if fault == "kept":
        draw, samples = RollOuts._draw, []

        def draw_and_keep(rollouts: RollOuts, update: int, micro: int) -> Any:
            samples.append(draw(rollouts, update, micro))
            del samples[: -rollouts._job.batch.accumulation]
            return samples[-1]

        RollOuts._draw = draw_and_keep


def measure_steps() -> None:
    train_step, sizes = Trainer.train_step, []

    def measured(trainer: Trainer, step: int) -> Any:
        if not sizes:
            sizes.append(held_memory().allocated)
        result = train_step(trainer, step)
        gc.collect()
        sizes.append(held_memory().allocated)
        write_json(trainer.job.output / "in_tensors.json", {"bytes": sizes})
        return result

    Trainer.train_step = measured


if __name__ == "__main__":
    put_in(sys.argv.pop(1))
    measure_steps()
    command()
