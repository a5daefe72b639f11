"""Samples are read ahead, and the teacher predicts ahead, while weights are updated; no number changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from background_run import PATIENCE
from recipes import recipe, student_engine
from slow_cases import slow_but
from trainers import trainer_of

from wandistiller.batch import STUDENT
from wandistiller.experts import Expert
from wandistiller.training.step_result import READING
from wandistiller.training.trainer import Trainer
from wandistiller.training.update import ReadAhead


def read(update: int, micro: int) -> tuple[int, int]:
    return update, micro


def test_each_micro_step_gets_its_own_samples_wherever_the_run_begins() -> None:
    for start in (0, 3):
        reads = ReadAhead(read, accumulation=3, updates=5, depth=4)
        places = [(update, micro) for update in range(start, 5) for micro in range(3)]
        assert [reads(*place) for place in places] == places


def test_each_sample_is_read_once_and_none_beyond_the_run() -> None:
    seen: list[tuple[int, int]] = []
    reads = ReadAhead(lambda *place: seen.append(place), accumulation=2, updates=3, depth=3)
    for update in range(3):
        for micro in range(2):
            reads(update, micro)
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_the_next_samples_are_read_before_they_are_asked_for() -> None:
    there = threading.Event()
    reads = ReadAhead(lambda update, _: there.set() if update == 2 else None, 1, updates=3, depth=2)
    reads(0, 0)
    assert there.wait(PATIENCE)


def test_an_error_in_reading_ahead_is_raised_where_the_samples_are_needed() -> None:
    def fails(update: int, _: int) -> None:
        if update == 1:
            raise OSError("the disk is gone")

    reads = ReadAhead(fails, accumulation=1, updates=2, depth=1)
    reads(0, 0)
    with pytest.raises(OSError, match="the disk is gone"):
        reads(1, 0)


def trainer(folder: Path, wan: Path, name: str, **block: Any) -> Trainer:
    """A trainer of 4 micro-steps an update, with pictures after its second step."""
    teacher = {"zero_optimization": {"stage": 0}, "wandistiller": {"guidance_passes": 1} | block}
    more = {"max_steps": 3, "sample_every": 2, "guidance_scale": 3.0, "teacher_deepspeed_config": teacher}
    more |= {"deepspeed_config": student_engine(2), "output_dir": str(folder / name)}
    more |= {"sample_steps": 2, "objective": ["velocity", "feature"]}
    return trainer_of(recipe(folder, wan, **more))


def learned(one: Trainer) -> list[Any]:
    losses = []
    for step in range(one.job.run.max_steps):
        losses.append(one.train_step(step).loss)
        one.draw_if_due(step + 1)
    student = one.learners[STUDENT].engine(Expert.HIGH_NOISE).module
    return [losses, [p.detach().clone() for p in student.parameters()]]


@pytest.mark.parametrize("placement", slow_but([{}], [{}, {"placement": "streamed", "sweep_micro_steps": 3}]))
def test_a_teacher_that_works_ahead_changes_no_bit_of_losses_and_weights(
    placement: dict[str, Any], folder: Path, wan2: Path, one_rank: torch.device
) -> None:
    name = placement.get("placement", "replicated")
    losses, weights = learned(trainer(folder, wan2, f"{name}_in_turn", **placement))
    ahead = trainer(folder, wan2, f"{name}_ahead", ahead=True, **placement)
    ahead_losses, ahead_weights = learned(ahead)
    assert ahead_losses == losses
    assert all(map(torch.equal, ahead_weights, weights))


def test_while_adam_updates_the_weights_the_teacher_predicts_for_the_next_update(
    folder: Path, wan2: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(folder, wan2, "meanwhile", ahead=True)
    engine, predicted, met = one.learners[STUDENT].engine(Expert.HIGH_NOISE), threading.Event(), []
    for network in one.teacher.inner.experts.values():
        network.module.register_forward_hook(lambda *_: predicted.set())
    adam = engine.optimizer.optimizer.ds_opt_adam
    update = adam.adam_update

    def waits(*settings_and_tensors: Any) -> None:
        predicted.clear() if not met else None
        met.append(predicted.wait(PATIENCE))
        update(*settings_and_tensors)

    monkeypatch.setattr(adam, "adam_update", waits)
    one.train_step(0)
    assert met and all(met)


def test_no_activity_of_a_step_lies_in_another_so_that_the_student_s_sampling_is_no_reading_of_data(
    folder: Path, wan1: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their seconds are added up, and a large share of reading is an alarm."""
    dmd2 = {"name": "dmd2", "steps": 2, "critic_updates": 1}
    more = {"objective": dmd2, "sample_prompts": [], "output_dir": str(folder / "sampling")}
    one, names, now = trainer_of(recipe(folder, wan1, **more)), set(), []

    @contextmanager
    def alone(name: str) -> Iterator[None]:
        assert not now, f"{name} in {now}"
        now.append(name)
        names.add(name)
        yield
        now.pop()

    monkeypatch.setattr("wandistiller.training.update.activity", alone)
    one.train_step(0)
    assert {READING, "the student's sampling"} < names
