"""Phased DMD2: the two experts of a student one after the other, one of each role in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import equal
from ranks import losses, metrics, wandistiller, write_json
from recipes import recipe, student_engine
from slow_cases import slow_but

from wandistiller.checkpoint import loading
from wandistiller.config.recipe import recipe_of
from wandistiller.config.stages import read_jobs
from wandistiller.experts import Expert
from wandistiller.planner.machine import most, this_machine
from wandistiller.planner.peak_memory import plan

HIGH, LOW = Expert
DMD2 = {"name": "dmd2", "steps": 4, "critic_updates": 1, "critic_lr": 2e-3}
DMD2 |= {"projected": True, "compare": "mixed"}  # half of the samples as without
STAGES = [
    {"name": "match", "max_steps": 1, "student_config": {"num_layers": 2, "experts": "two"}},
    {"name": "high", "max_steps": 3, "objective": DMD2 | {"expert": "high_noise"}},
    {"name": "low", "max_steps": 3, "objective": DMD2 | {"expert": "low_noise"}},
]
SHIFT = 7.0  # half of the steps are above the boundary 0.875, and one is at it


def phased(folder: Path, wan: Path, name: str, ranks: int, *flags: str, **more: Any) -> Path:
    given = recipe(folder, wan, output_dir=str(folder / name), save_every=1, shift=SHIFT, stages=STAGES)
    del given["max_steps"], given["student_config"]
    file = write_json(folder / f"{name}.json", given | more)
    wandistiller("train", "--recipe", file, *flags, ranks=ranks)
    return folder / name


@pytest.fixture(scope="module")
def whole(folder: Path, wan2: Path) -> Path:
    return phased(folder, wan2, "whole", 1)


def weights(run: Path, step: int, expert: Expert) -> dict[str, torch.Tensor]:
    found = loading.read_weights(run / "checkpoints" / f"step_{step:08d}", expert)
    return {name: value.clone() for name, value in found}


@pytest.mark.slow
def test_each_stage_changes_its_own_expert_alone(whole: Path) -> None:
    match, high, low = (whole / name for name in ("1_match", "2_high", "3_low"))
    before, after, end = weights(match, 1, HIGH), weights(high, 3, HIGH), weights(low, 3, HIGH)
    assert not equal(before, after) and equal(after, end)
    before, after, end = weights(match, 1, LOW), weights(high, 3, LOW), weights(low, 3, LOW)
    assert equal(before, after) and not equal(after, end)


@pytest.mark.parametrize("stage", slow_but([], [0, 3]))
def test_losses_do_not_depend_on_ranks_or_stage(folder: Path, wan2: Path, whole: Path, stage: int) -> None:
    engine = student_engine(stage, offload=stage > 0)
    two = phased(folder, wan2, f"two_{stage}", 2, deepspeed_config=engine)
    for name in ("2_high", "3_low"):
        assert losses(two / name) == pytest.approx(losses(whole / name), rel=1e-5)
        critics = ([line["critic"]["loss"] for line in metrics(f / name)] for f in (two, whole))
        assert next(critics) == pytest.approx(next(critics), rel=1e-5)
        assert {line["expert"] for line in metrics(whole / name)} == {
            {"2_high": HIGH, "3_low": LOW}[name].value
        }


@pytest.mark.slow
def test_a_resumed_stage_has_the_losses_bit_for_bit(folder: Path, wan2: Path, whole: Path) -> None:
    for name in ("2_high", "3_low"):
        written = whole / name / "resolved" / "run.json"
        middle = whole / name / "checkpoints" / "step_00000001"
        wandistiller("train", "--recipe", written, "--resume", middle, "--output_dir", folder / name)
        assert losses(folder / name) == losses(whole / name)[1:]


def test_a_plan_counts_one_expert_of_each_role_and_the_finished_one(folder: Path, wan2: Path) -> None:
    given = recipe(folder, wan2, output_dir=str(folder / "plan"), shift=SHIFT, stages=STAGES)
    del given["max_steps"], given["student_config"]
    jobs = read_jobs(recipe_of(given, {}), 1)
    phases = [plan(job, this_machine(folder))["train"] for job in jobs]
    assert ["student's finished expert" in phases[n].lasting for n in (1, 2)] == [False, True]
    teachers = [phase.lasting["teacher's weights"].host for phase in phases]
    assert teachers[1] == teachers[2] < teachers[0]
    assert all(most(plan(job, this_machine(folder))).host > 0 for job in jobs)
