"""Passes of the networks in a real step, forward and backward, counted by hooks, against those planned."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import ONE_24, RATES
from recipes import recipe, student_engine
from slow_cases import slow_but
from torch import Tensor, nn
from trainers import trainer_of

from wandistiller.planner.step_time import StepTime
from wandistiller.teacher.base import local_modules, without_guidance
from wandistiller.wan.flops import forward_flops

DMD2 = {"name": "dmd2", "steps": 4, "critic_updates": 5}
RUNS = {
    "adapters on one base": {
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


def count(network: nn.Module, passes: Counter, name: str) -> None:
    """Let `passes` have the samples of all calls of a network's blocks, recomputed ones too, and backward."""

    def called(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        passes[name, "forward"] += len(inputs[0]) / len(network.blocks)

    def learns(_: nn.Module, __: Any, outputs: tuple[Tensor, ...]) -> None:
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda v: passes.update({(name, "backward"): len(v)}))

    for block in network.blocks:
        block.register_forward_pre_hook(called)
    network.register_forward_hook(learns)


@pytest.mark.parametrize("run", slow_but(["adapters on one base"], RUNS))
def test_a_step_of_dmd2_makes_the_planned_passes_for_each_of_its_samples(
    run: str, wan1: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    """But for the drawn number of steps, 0 to 3, of which the plan has the mean."""
    given = {"objective": DMD2, "guidance_scale": 4.0, "output_dir": str(tmp_path / "run")} | RUNS[run]
    trainer, passes = trainer_of(recipe(tmp_path, wan1, **given)), Counter()
    job, learners = trainer.job, trainer.learners
    drawn = [next(iter(trainer._read(u, m).values())).exit for u in range(6) for m in range(4)]
    (teacher,) = set(local_modules(without_guidance(trainer.teacher)).values())
    networks = {role: network for role, one in learners.items() for network in one.networks.values()}
    for name, network in (networks | {"teacher": teacher}).items():
        count(network, passes, name)
    trainer.train_step(0)
    latent = job.folder.latent_shape(32, 32, 1)
    size = forward_flops(job.student_transformer, latent) / forward_flops(job.folder.config, latent)
    critic = 1 if run.startswith("every") else size
    sizes, found = {"student": size, "critic": critic, "teacher": 1}, Counter()
    for (name, kind), samples in passes.items():
        found[name] += sizes[name] * (2 if kind == "backward" else 1) * samples / job.batch.total
    planned = StepTime(job, ONE_24, RATES).forward_passes()
    planned["student"] += size * (sum(drawn) / 4 - 6 * 1.5)
    assert found == pytest.approx(planned, rel=1e-6)
    assert planned["teacher"] == 2 and passes["critic", "backward"] == 5 * job.batch.total
