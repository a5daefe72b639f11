"""Called on ranks by test_context_parallel.py: short runs whose ranks share sequences, or do not."""

import gc
from pathlib import Path
from typing import Any

from recipes import recipe, student_engine
from trainers import job_of, parts_of, trainer_of

from wandistiller.distributed import collectives
from wandistiller.utils.files import read_json

STEPS = 2
SIZE = {"height": 32, "width": 32, "num_frames": 5}
"""2 latent frames of 2x2 patches: 8 tokens."""
Curve = dict[str, list[float]]


def given_for(folder: Path, wan: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Return a recipe whose output is in `folder`/`name`; its teacher may be a shipped JSON's name."""
    teacher = settings.pop("teacher", None)
    if teacher:
        settings["teacher_deepspeed_config"] = read_json(f"ds_configs/teacher/{teacher}.json")
        settings["teacher_dtype"] = "float32"
    usual = {"output_dir": str(folder / name), "max_steps": STEPS, "deepspeed_config": student_engine(2)}
    return recipe(folder, wan, **SIZE | usual | settings)


def curves(folder: Path, wan: Path, runs: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    """Return the losses and gradient norms of each step by run, of settings of a recipe each."""
    curve_of = {}
    for name, settings in runs.items():
        values = given_for(folder, wan, f"{name}_{collectives.world_size()}", **settings)
        trainer = trainer_of(values, parts_of(job_of(values)))
        steps = [trainer.train_step(step) for step in range(STEPS)]
        curve_of[name] = {"losses": [s.loss for s in steps], "norms": [s.grad_norm for s in steps]}
        if steps[0].others:
            curve_of[name] |= {"critic": [s.others["critic"]["loss"] for s in steps]}
            curve_of[name] |= {"critic norms": [s.others["critic"]["grad_norm"] for s in steps]}
        for learner in trainer.learners.values():
            learner.engines.clear()
        del trainer
        gc.collect()
        collectives.log0("%s: done", name)
    return curve_of
