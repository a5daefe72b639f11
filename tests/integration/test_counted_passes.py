"""Passes of the networks in a real step, forward and backward, counted by hooks, against those planned."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import recipe, student_engine
from slow_cases import slow_but
from torch import Tensor, nn
from trainers import trainer_of

from wandistiller.planner.time import Passes, passes
from wandistiller.teacher.base import local_modules
from wandistiller.training.trainer import Trainer

DMD2 = {"name": "dmd2", "steps": 4, "critic_updates": 2}
CARRIED = DMD2 | {"critic_updates": 1, "shared": True, "carried": True, "projected": True, "compare": "mixed"}
RUNS = {
    "adapters on one base": {
        "student_config": {},
        "lora": {"rank": 4},
        "teacher_deepspeed_config": {"wandistiller": {"placement": "streamed"}},
    },
    "two networks in one update, on one base": {
        "objective": DMD2 | {"shared": True, "projected": True, "compare": "mixed"},
        "student_config": {},
        "lora": {"rank": 4},
        "teacher_deepspeed_config": {"wandistiller": {"placement": "streamed"}},
    },
    "a smaller student": {"teacher_deepspeed_config": {"wandistiller": {"placement": "owner"}}},
    "every second block recomputed": {
        "deepspeed_config": student_engine(2, wandistiller={"checkpoint_every": 2}),
        "objective": DMD2 | {"critic_start": "teacher"},
    },
}


def count(network: nn.Module, counted: Counter, name: str) -> None:
    """Count the samples of all calls of a network's blocks, recomputed ones too, and of backward passes."""

    def called(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        counted[name, "forward"] += len(inputs[0]) / len(network.blocks)

    def learns(_: nn.Module, __: Any, outputs: tuple[Tensor, ...]) -> None:
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda v: counted.update({(name, "backward"): len(v)}))

    for block in network.blocks:
        block.register_forward_pre_hook(called)
    network.register_forward_hook(learns)


def watch(trainer: Trainer) -> Counter:
    """Count the passes of each network of a run."""
    counted, (teacher,) = Counter(), local_modules(trainer.teacher)
    networks = {role: n.module for role, one in trainer.learners.items() for n in one.networks.values()}
    for name, network in (networks | {"teacher": teacher}).items():
        count(network, counted, name)
    return counted


@pytest.mark.parametrize(("guidance_share", "worth"), slow_but([(0.5, 9.5)], [(1, 10), (0.5, 9.5)]))
def test_a_step_whose_samples_go_on_makes_ten_passes_in_place_of_forty_one(
    wan1: Path, tmp_path: Path, one_rank: torch.device, guidance_share: float, worth: float
) -> None:
    """A backward pass counts twice."""
    engine = student_engine(2, train_micro_batch_size_per_gpu=8)
    objective = CARRIED | {"guidance_share": guidance_share}
    given = {"objective": objective, "guidance_scale": 4.0, "deepspeed_config": engine}
    given |= RUNS["adapters on one base"] | {"output_dir": str(tmp_path / "run")}
    trainer = trainer_of(recipe(tmp_path, wan1, **given))
    counted, planned = watch(trainer), passes(trainer.job)
    for step in range(2):
        counted.clear()
        trainer.train_step(step)
        found = {role: Passes(*(counted[role, kind] / 8 for kind in Passes._fields)) for role in planned}
        assert found == {role: pytest.approx(each) for role, each in planned.items()}
        assert sum(each.forward + 2 * each.backward for each in found.values()) == worth


@pytest.mark.parametrize("run", slow_but([], RUNS))
def test_a_step_of_dmd2_makes_the_planned_passes_for_each_of_its_samples(
    run: str, wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    """But for the drawn number of steps, 0 to 3, of which the plan has the mean."""
    given = {"objective": DMD2, "guidance_scale": 4.0, "output_dir": str(tmp_path / "run")} | RUNS[run]
    trainer = trainer_of(recipe(tmp_path, wan1, **given))
    job, counted = trainer.job, watch(trainer)
    updates = len(job.objective.updates)
    drawn = [next(iter(trainer.updates.draw(u, m).values())).exit for u in range(updates) for m in range(4)]
    trainer.train_step(0)
    planned = passes(job)
    own = planned["student"]
    planned["student"] = own._replace(forward=own.forward + sum(drawn) / 4 - updates * 1.5)
    total = job.batch.total
    found = {role: Passes(*(counted[role, kind] / total for kind in Passes._fields)) for role in planned}
    assert found == {role: pytest.approx(each, rel=1e-6) for role, each in planned.items()}
    assert planned["teacher"] == (2, 0) and found["critic"].backward == 2
