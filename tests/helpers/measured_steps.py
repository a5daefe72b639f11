"""The command line; OUTPUT/in_tensors.json has the bytes in tensors on the GPU before and after each step."""

import gc
from typing import Any

from wandistiller.cli.main import command
from wandistiller.distributed.device import held_memory
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import write_json

train_step, sizes = Trainer.train_step, []


def measured(trainer: Trainer, step: int) -> Any:
    if not sizes:
        sizes.append(held_memory().allocated)
    result = train_step(trainer, step)
    gc.collect()
    sizes.append(held_memory().allocated)
    write_json(trainer.job.output / "in_tensors.json", {"bytes": sizes})
    return result


if __name__ == "__main__":
    Trainer.train_step = measured
    command()
