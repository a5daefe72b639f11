"""A critic's update that is not finite: neither network learns from it, and the sample is named."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import equal, spoil_cached
from ranks import metrics, wandistiller
from recipes import recipe, recipe_file, student_engine
from slow_cases import slow_but
from torch import Tensor
from trainers import trainer_of

from wandistiller.batch import STUDENT
from wandistiller.experts import Expert
from wandistiller.objectives.dmd2 import CRITIC
from wandistiller.training.trainer import Trainer
from wandistiller.training.update import propagate_nonfinite

DMD2 = {"name": "dmd2", "steps": 2, "critic_updates": 2, "critic_lr": 2e-3}
SETTINGS: dict[str, Any] = {
    "objective": DMD2,
    "max_steps": 4,
    "save_every": 1,
    "sample_prompts": ["a red square"],  # of no sample
    "deepspeed_config": student_engine(2, train_batch_size=4),
}
BAD = "a red circle on a blue background, left"
"""One of the eight prompts, of which an update has four: in every second update."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> Path:
    """A cache in which the text of one prompt is not finite."""
    folder = tmp_path_factory.mktemp("prepared")
    wandistiller("prepare", "--recipe", recipe_file(folder, wan1, **SETTINGS))
    spoil_cached(folder / "cache" / "text", BAD, (0, 0), math.nan)
    return folder


def run(
    cache: Path, tmp_path: Path, wan: Path, code: int, how: str, ranks: int = 1, **more: Any
) -> tuple[Path, str]:
    shutil.copytree(cache / "cache", tmp_path / "cache")
    file = recipe_file(tmp_path, wan, **SETTINGS | more, on_nonfinite=how)
    done = wandistiller("train", "--recipe", file, ranks=ranks, code=code)
    return tmp_path / "run", done.stderr


@pytest.mark.parametrize("ranks", slow_but([1], [1, 2]))
def test_a_run_that_stops_names_the_sample_and_keeps_its_last_checkpoint(
    cache: Path, tmp_path: Path, wan1: Path, ranks: int
) -> None:
    output, message = run(cache, tmp_path, wan1, 4 if ranks == 1 else 1, "stop", ranks)
    assert f"{BAD!r}; its cached text is not finite" in message
    (file,) = (output / "nonfinite").glob("step_*.json")
    losses = [sample["losses"] for sample in json.loads(file.read_text())["samples"]]
    assert any(None in loss.values() for loss in losses)
    finished = len(metrics(output))
    kept = [int(folder.name[5:]) for folder in (output / "checkpoints").glob("step_*")]
    assert all(step <= finished for step in kept)


def weights(trainer: Trainer) -> dict[str, dict[str, Tensor]]:
    modules = {role: one.engine(Expert.HIGH_NOISE).module for role, one in trainer.learners.items()}
    return {role: {n: p.detach().clone() for n, p in m.named_parameters()} for role, m in modules.items()}


def test_of_an_update_that_trains_both_networks_neither_learns_and_the_file_has_both_losses(
    cache: Path, tmp_path: Path, wan1: Path, one_rank: torch.device
) -> None:
    """One of the first two has the sample."""
    shutil.copytree(cache / "cache", tmp_path / "cache")
    shared = {"objective": DMD2 | {"critic_updates": 1, "shared": True}, "on_nonfinite": "skip"}
    trainer = trainer_of(recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), **SETTINGS | shared))
    outcomes = []
    for step in range(2):
        before, result, after = weights(trainer), trainer.train_step(step), weights(trainer)
        unchanged = {role: equal(before[role], after[role]) for role in (STUDENT, CRITIC)}
        bad = {STUDENT: math.isnan(result.loss), CRITIC: math.isnan(result.others[CRITIC]["loss"])}
        assert unchanged == bad
        outcomes.append(set(bad.values()))
    assert sorted(outcomes, key=str) == [{False}, {True}] and trainer.nonfinite.skipped == 1
    (file,) = (tmp_path / "run" / "nonfinite").glob("step_*.json")
    assert all(s["losses"].keys() == {"dmd2", CRITIC} for s in json.loads(file.read_text())["samples"])


@pytest.mark.slow
def test_samples_of_an_update_that_is_not_finite_do_not_go_on(
    cache: Path, tmp_path: Path, wan1: Path, one_rank: torch.device
) -> None:
    """Each two updates have the same four of eight prompts."""
    shutil.copytree(cache / "cache", tmp_path / "cache")
    carried = {"objective": DMD2 | {"critic_updates": 1, "shared": True, "carried": True}, "max_steps": 16}
    carried |= {"on_nonfinite": "skip", "output_dir": str(tmp_path / "run")}
    trainer = trainer_of(recipe(tmp_path, wan1, **SETTINGS | carried))
    items, micros = trainer.batches.items, range(trainer.job.batch.accumulation)
    prompts = {u: [item.prompt for m in micros for item in items(u, m)] for u in range(0, 16, 2)}
    firsts = {BAD not in of_turn: first for first, of_turn in prompts.items()}
    for is_finite, first in firsts.items():
        for step in (first, first + 1):
            assert math.isfinite(trainer.train_step(step).loss) == is_finite
            assert bool(trainer.updates.carried.stored()) == (is_finite and step == first)
    reports = [json.loads(file.read_text()) for file in (tmp_path / "run" / "nonfinite").glob("step_*.json")]
    bad = [{s["prompt"] for s in report["samples"] if "text" in s["not_finite"]} for report in reports]
    assert bad == [{BAD}, {BAD}] and firsts.keys() == {True, False}


def test_one_loss_that_is_not_finite_spoils_the_gradients_of_all_networks_of_an_update() -> None:
    values = {role: torch.tensor(1.0, requires_grad=True) for role in (STUDENT, CRITIC)}
    losses = {STUDENT: 2 * values[STUDENT], CRITIC: values[CRITIC] + math.inf}
    for loss in propagate_nonfinite(losses).values():
        loss.backward()
    assert all(value.grad.isnan() for value in values.values())
