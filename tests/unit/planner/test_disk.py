"""Planned files of a run, against sums done by hand and against what a run then wrote."""

from pathlib import Path
from tempfile import gettempdir
from typing import Any

import planned
import pytest
from reading import read_run

from wandistiller.cli.main import main
from wandistiller.config.job import Job
from wandistiller.config.validate import read_job
from wandistiller.planner.disk import on_its_disk, written
from wandistiller.planner.machine import Machine
from wandistiller.planner.peak_memory import plan
from wandistiller.utils.system_memory import GIB, disk

ONE = Machine(80 * GIB, 1000 * GIB, 1000 * GIB, 1, 1)
X0 = 4 * 16 * 60 * 104
"""Bytes of the latent of an image of 480x832."""


def job(published: Path, wan: str = "Wan2.1-T2V-1.3B", **more: Any) -> Job:
    return planned.published_job(published, ONE, wan, **more)


TWO_EXPERTS = {"wan": "Wan2.2-T2V-A14B", "student_config": "ds_configs/students/half_two_experts.json"}


@pytest.mark.parametrize(
    ("each", "experts", "more"), [(12, 1, {}), (16, 1, {"ema": 0.9}), (12, 2, TWO_EXPERTS)]
)
def test_a_checkpoint_is_weights_moments_and_average_of_each_network_and_the_student_two_bytes(
    published: Path, each: int, experts: int, more: dict[str, Any]
) -> None:
    run = job(published, **more)
    files, numel = written(run, accelerator=True), experts * run.student_transformer.numel
    assert (files.checkpoint, files.student) == (each * numel, 2 * numel)


def test_frozen_weights_are_kept_once_for_all_checkpoints(published: Path) -> None:
    whole, part = (
        written(job(published, max_steps=5000, **more), accelerator=True)
        for more in ({}, {"frozen": ["blocks.*"]})
    )
    frozen = part.student - whole.student
    assert frozen > 0 and whole.checkpoint == part.checkpoint + 3 * frozen
    assert part.output == 4 * part.checkpoint + part.student


def test_a_run_of_the_whole_teachers_adapters_writes_no_copy_of_the_teacher(published: Path) -> None:
    lora = {"student_config": {}, "lora": {"rank": 4, "targets": ["attn1.to_q"]}}
    run = job(published, **lora, teacher_deepspeed_config="stream")
    adapters = run.student_transformer.num_layers * 2 * 4 * run.student_transformer.width
    assert written(run, accelerator=True).student == 2 * adapters
    assert plan(run, ONE, coding=False)["export"].parts(lambda b: b.host)["exported network"] == 6 * adapters


@pytest.mark.parametrize(("steps", "at_once"), [(1, 1), (2, 2), (5000, 4)])
def test_one_more_checkpoint_is_there_than_are_kept(published: Path, steps: int, at_once: int) -> None:
    run = job(published, max_steps=steps, save_every=500, keep_checkpoints=3)
    assert written(run, accelerator=True).checkpoints == at_once


def test_latents_are_counted_by_sample_with_their_paths_and_no_more_than_the_steps_reach(
    published: Path,
) -> None:
    def more_than_a_latent_each(**more: Any) -> int:
        usual, changed = (job(published, **{"max_steps": 100} | changes) for changes in ({}, more))
        return written(changed, accelerator=True).cache - written(usual, accelerator=True).cache

    prompts, batch = len(job(published).items), job(published).batch.total
    assert more_than_a_latent_each(rollouts_per_prompt=2) == prompts * X0
    assert more_than_a_latent_each(objective="trajectory", rollout_steps=10) == 10 * prompts * X0
    assert more_than_a_latent_each(rollouts_per_prompt=100, max_steps=3) == (3 * batch - prompts) * X0


def test_a_run_writes_the_planned_files(finished: Path) -> None:
    def written_to(folder: Path) -> int:
        return sum(f.stat().st_size for f in folder.rglob("*.safetensors"))

    files = written(read_job(read_run(f"{finished}/resolved/run.json", {}), 2), accelerator=False)
    states = written_to(finished / "checkpoints/step_00000004")
    student, cache = written_to(finished / "student/transformer"), written_to(finished.parent / "cache")
    assert files.checkpoint <= states < 1.05 * files.checkpoint + 20_000  # names and places of the pieces
    assert files.student <= student < 1.05 * files.student + 20_000
    assert 0.5 * cache < files.cache < 2 * cache


MEMORY = Path("/dev/shm")
other_disk = pytest.mark.skipif(
    not MEMORY.is_dir() or disk(MEMORY) == disk(Path(gettempdir())), reason="no second disk"
)


@other_disk
def test_only_files_of_the_same_disk_are_beside_what_is_swapped(published: Path, tmp_path: Path) -> None:
    run = job(published, output_dir=str(MEMORY / "nowhere"), cache_dir=str(tmp_path))
    files = written(run, accelerator=True)
    assert on_its_disk(ONE, run, tmp_path / "swap").files == files.cache > 0
    assert on_its_disk(ONE, run, MEMORY / "swap").files == files.output
    assert on_its_disk(ONE, run, None).files == files.whole


@pytest.mark.slow
@other_disk
@pytest.mark.usefixtures("quiet_logging")
def test_plan_looks_at_the_disks_that_the_run_names(
    wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = f"--teacher_path {wan1} --data_path tiny --height 32 --width 32 --output_dir {tmp_path / 'x'}"
    assert main(["plan", *words.split(), "--cache_dir", str(MEMORY / "nowhere")]) == 0
    output = capsys.readouterr().out
    assert f"of the disk of {MEMORY / 'nowhere'} (" in output and output.count("of the disk of ") > 1
