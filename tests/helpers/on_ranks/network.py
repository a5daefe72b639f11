"""Run on ranks by bench/network.py: trains three steps, and records the bytes sent in the third."""

import json
import os
import sys
from pathlib import Path

from deepspeed.comm import comm

from wandistiller.cli.main import main
from wandistiller.distributed import collectives
from wandistiller.training.step_result import StepResult
from wandistiller.training.trainer import Trainer

whole_step = Trainer.train_step


def sent() -> dict[str, int]:
    """Bytes by network interface of this node, since it is there."""
    rows = (line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return {name.strip(): int(numbers.split()[8]) for name, numbers in rows}


def counted(self: Trainer, step: int) -> StepResult:
    if step < 2:
        return whole_step(self, step)
    comm.configure(enabled=True, prof_all=True)
    collectives.barrier()
    before = sent()
    result = whole_step(self, step)
    collectives.barrier()
    after = sent()
    comm.configure(enabled=False)
    ops = {
        name: sum(size * seen[0] for size, seen in sizes.items())
        for name, sizes in comm.comms_logger.get_raw_data().items()
    }
    counts = {"sent": {name: after[name] - before[name] for name in after}, "ops": ops}
    (self.job.output.parent / f"sent_{collectives.rank()}.json").write_text(json.dumps(counts))
    return result


Trainer.train_step = counted
code = main(["train", "--recipe", sys.argv[1]])
sys.stdout.flush()
os._exit(code)
