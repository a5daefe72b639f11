"""What GPUs keep where a JSON leaves it open: the optimizer of adapters, and blocks' activations."""

from dataclasses import replace
from pathlib import Path

import pytest
from planned import gpus
from planned import published_job as job

from wandistiller.config.job import Job
from wandistiller.planner.free_memory import with_free_memory
from wandistiller.planner.machine import Machine, demands, moments
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.time import passes
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB


def with_adapters(published: Path, machine: Machine) -> Job:
    """The 14B's adapters as the shipped recipe trains them, with free memory left to the plan."""
    recipe = read_json("ds_configs/machines/1x16_wan2.1_14b_lora.json")
    engine = read_json(recipe["deepspeed_config"]) | {"wandistiller": {"checkpoint_but_last": "auto"}}
    keys = ("lora", "teacher_deepspeed_config", "lr", "objective")
    given = {key: recipe[key] for key in keys} | {"batch_size": 4, "deepspeed_config": engine}
    return job(published, machine, **given)


@pytest.mark.parametrize(("each", "place"), [(8, "cpu"), (24, "none")])
def test_the_optimizer_of_adapters_is_on_a_gpu_that_has_room_for_it(
    published: Path, each: int, place: str
) -> None:
    machine = gpus(1, each, 128)
    run = with_adapters(published, machine)
    placed, (line, _) = with_free_memory(run, machine)
    assert run.student_engine.optimizer_on == "cpu" and placed.student_engine.optimizer_on == place
    assert ("optimizer on the GPUs" in line) == (place == "none")


def needed(run: Job, machine: Machine, blocks: int) -> float:
    """The share of a GPU that a run takes if so many blocks keep their activations."""
    engine = run.student_engine.replaced(wandistiller={"checkpoint_but_last": blocks})
    gpu, *_ = demands(moments(plan(replace(run, student_engine=engine), machine, coding=False)), machine)
    return gpu.need / machine.device_free


def test_as_many_blocks_keep_their_activations_as_leave_a_tenth_of_the_memory(published: Path) -> None:
    """Beside the optimizer 24 GB have room for less than a tenth of the blocks: then none does."""
    kept = []
    for each in (24, 48, 80):
        machine = gpus(1, each, 128)
        run, (_, line) = with_free_memory(with_adapters(published, machine), machine)
        kept.append(run.student_engine.recompute.checkpoint_but_last)
        assert f"of {f'the last {kept[-1]} of 40 blocks' if kept[-1] else 'no block'} kept;" in line
        assert kept[-1] == 0 or needed(run, machine, kept[-1]) <= 0.9 < needed(run, machine, kept[-1] + 1)
        assert passes(run)["student"].forward == pytest.approx(2 - kept[-1] / 40)
    assert kept[0] == 0 < kept[1] < kept[2] < 40


def test_without_a_gpu_the_optimizer_is_in_cpu_memory_and_all_blocks_are_recomputed(published: Path) -> None:
    machine = Machine(None, 128 * GIB, 1000 * GIB, 1, 1)
    placed, lines = with_free_memory(with_adapters(published, machine), machine)
    assert placed.student_engine.optimizer_on == "cpu" and lines == []
    assert placed.student_engine.recompute.recomputed(40) == range(40)
