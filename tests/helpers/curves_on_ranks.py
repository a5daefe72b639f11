"""Run by test_curves.py and bench/curves.py on N ranks: the losses of one small run under each student JSON.

torchrun --nproc_per_node=2 tests/helpers/curves_on_ranks.py FOLDER WAN STEPS RESULTS NAME [NAME ...]
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from recipes import ADAM, recipe

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed import collectives
from wandistiller.training.build_student import build_student
from wandistiller.training.prepare import guided_teacher, prepare
from wandistiller.training.trainer import Trainer
from wandistiller.utils.files import read_json

BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
TEACHER = {"zero_optimization": {"stage": 0}}


def engine(name: str, precision: str, swap: Path) -> dict[str, Any]:
    """Return a shipped JSON's ZeRO and checkpointing with the shared batch, optimizer and precision."""
    shipped = read_json(f"ds_configs/student/{name}.json")
    kept = {
        k: v
        for k, v in shipped.items()
        if k in ("zero_optimization", "activation_checkpointing", "aio", "wandistiller")
    }
    for section in kept["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = str(swap)
    return (
        kept | BATCH | {"optimizer": ADAM, "bf16": {"enabled": precision == "bf16"}, "gradient_clipping": 1.0}
    )


def curves(folder: Path, wan: Path, steps: int, names: list[str]) -> dict[str, list[float]]:
    """`NAME PRECISION` -> losses."""
    found, teacher = {}, None
    for name in names:
        for precision in ("float32", "bf16"):
            ds = engine(name, precision, folder / f"swap_{precision}")
            more = {
                "deepspeed_config": ds,
                "output_dir": str(folder / "run"),
                "teacher_deepspeed_config": TEACHER,
            }
            job = read_job(
                RunConfig(**recipe(folder, wan, max_steps=steps, **more)), collectives.world_size()
            )
            data, text, made = prepare(job)
            teacher = teacher or made or guided_teacher(job, text)
            trainer = Trainer(job, data, text, teacher, build_student(job))
            found[f"{name} {precision}"] = [trainer.train_step(step).loss for step in range(steps)]
            trainer.student.engines.clear()
            del trainer
            gc.collect()
            collectives.log0("%s %s: done", name, precision)
    return found


if __name__ == "__main__":
    folder, wan, steps, results, *names = sys.argv[1:]
    collectives.init("warning")
    found = curves(Path(folder), Path(wan), int(steps), names)
    if collectives.rank() == 0:
        Path(results).write_text(json.dumps(found))
    collectives.destroy()
