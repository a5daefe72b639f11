"""Run by test_curves.py and bench/curves.py on N ranks: the losses of one small run under each student JSON.

    python -m torch.distributed.run --nproc_per_node=2 tests/curves_on_ranks.py FOLDER WAN STEPS RESULTS NAME [NAME ...]
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from recipes import ADAM, recipe  # noqa: E402

from wandistiller import distributed  # noqa: E402
from wandistiller.check import read_job  # noqa: E402
from wandistiller.config import RunConfig, read_json  # noqa: E402
from wandistiller.prepare import guided_teacher, prepare  # noqa: E402
from wandistiller.train import build_student  # noqa: E402
from wandistiller.trainer import Trainer  # noqa: E402

BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
TEACHER = {"zero_optimization": {"stage": 0}}


def engine(name: str, precision: str, swap: Path) -> dict[str, Any]:
    """A shipped JSON with the batch, optimizer and precision that all share; its ZeRO and checkpointing are its own."""
    shipped = read_json(f"ds_configs/student/{name}.json")
    kept = {k: v for k, v in shipped.items() if k in ("zero_optimization", "activation_checkpointing", "aio", "wandistiller")}
    for section in kept["zero_optimization"].values():
        if isinstance(section, dict) and "nvme_path" in section:
            section["nvme_path"] = str(swap)
    return kept | BATCH | {"optimizer": ADAM, "bf16": {"enabled": precision == "bf16"}, "gradient_clipping": 1.0}


def curves(folder: Path, wan: Path, steps: int, names: list[str]) -> dict[str, list[float]]:
    """`NAME PRECISION` -> losses."""
    found, teacher = {}, None
    for name in names:
        for precision in ("float32", "bf16"):
            ds = engine(name, precision, folder / f"swap_{precision}")
            more = {"deepspeed_config": ds, "output_dir": str(folder / "run"), "teacher_deepspeed_config": TEACHER}
            job = read_job(RunConfig(**recipe(folder, wan, max_steps=steps, **more)), distributed.world_size())
            data, text, made = prepare(job)
            teacher = teacher or made or guided_teacher(job, text)
            trainer = Trainer(job, data, text, teacher, build_student(job))
            found[f"{name} {precision}"] = [sum(trainer.optimizer_step(step).losses) for step in range(steps)]
            trainer.student.engines.clear()
            del trainer
            gc.collect()
            distributed.log0("%s %s: done", name, precision)
    return found


if __name__ == "__main__":
    folder, wan, steps, results, *names = sys.argv[1:]
    distributed.init("warning")
    found = curves(Path(folder), Path(wan), int(steps), names)
    if distributed.rank() == 0:
        Path(results).write_text(json.dumps(found))
    distributed.finish()
