"""What a run is said to write to disk, against sums done by hand and against what a run then wrote."""

from pathlib import Path
from typing import Any

import planned
import pytest
from ranks import wandistiller, write_json
from recipes import recipe

from wandistiller.cli.main import main
from wandistiller.config.job import Job
from wandistiller.config.shorthands import merged
from wandistiller.config.validate import read_job
from wandistiller.planner.disk import disk_line, on_its_disk, written
from wandistiller.planner.machine import Machine
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB, disk
from wandistiller.wan.transformer import count_parameters

ONE = Machine(80 * GIB, 1000 * GIB, 1000 * GIB, 1, 1)
X0 = 4 * 16 * 60 * 104
"""Bytes of the latent of an image of 480x832."""


def job(published: Path, wan: str = "Wan2.1-T2V-1.3B", **more: Any) -> Job:
    return planned.published_job(published, ONE, wan, **more)


def test_a_checkpoint_is_weights_and_two_moments_of_each_network_and_the_average(published: Path) -> None:
    two = "ds_configs/students/half_two_experts.json"
    for n, wan, more in (
        (12, "Wan2.1-T2V-1.3B", {}),
        (16, "Wan2.1-T2V-1.3B", {"ema": 0.9}),
        (24, "Wan2.2-T2V-A14B", {"student_config": two}),
    ):
        asked = job(published, wan, **more)
        assert written(asked, accelerator=True).checkpoint == n * count_parameters(asked.student_transformer)


def test_frozen_weights_are_kept_once_for_all_checkpoints(published: Path) -> None:
    whole, part = (
        written(job(published, max_steps=5000, **more), accelerator=True)
        for more in ({}, {"frozen": ["blocks.*"]})
    )
    frozen = part.student - whole.student
    assert frozen > 0 and whole.checkpoint == part.checkpoint + 3 * frozen
    assert part.output == 4 * part.checkpoint + part.student


@pytest.mark.parametrize(
    ("steps", "every", "keep", "at_once"), [(100, 500, 3, 1), (1000, 500, 3, 2), (5000, 500, 3, 4)]
)
def test_one_more_checkpoint_is_there_than_are_kept(
    published: Path, steps: int, every: int, keep: int, at_once: int
) -> None:
    asked = job(published, max_steps=steps, save_every=every, keep_checkpoints=keep)
    assert written(asked, accelerator=True).checkpoints == at_once


def test_latents_are_counted_by_sample_with_their_paths_and_no_more_than_the_steps_reach(
    published: Path,
) -> None:
    def cache(**more: Any) -> int:
        return written(job(published, **more), accelerator=True).cache

    prompts, batch = len(job(published).items), job(published).batch.total
    assert cache(rollouts_per_prompt=2, max_steps=100) - cache(max_steps=100) == prompts * X0
    assert (
        cache(max_steps=100, rollout_path=True, rollout_steps=10) - cache(max_steps=100) == 10 * prompts * X0
    )
    assert cache(rollouts_per_prompt=100, max_steps=3) - cache(max_steps=100) == (3 * batch - prompts) * X0


def test_a_run_writes_what_was_said(tmp_path: Path, wan1: Path) -> None:
    given = recipe(
        tmp_path,
        wan1,
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        save_every=1,
        student_config={"num_layers": 1},
    )
    read = read_job(merged(given, {}, None), 1)
    said = written(read, accelerator=False)
    wandistiller("train", "--recipe", write_json(tmp_path / "recipe.json", given))
    saved = tmp_path / "out/checkpoints/step_00000002"
    states = sum(f.stat().st_size for f in saved.rglob("*.safetensors"))
    student = sum(f.stat().st_size for f in (tmp_path / "out/student/transformer").glob("*.safetensors"))
    cache = sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*.safetensors"))
    assert said.checkpoint <= states < 1.05 * said.checkpoint + 20_000  # names and places of the pieces
    assert said.student <= student < 1.05 * said.student + 20_000
    assert 0.5 * cache < said.cache < 2 * cache


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(published: Path, tmp_path: Path) -> None:
    roomy = disk_line(job(published, output_dir=str(tmp_path)), accelerator=True)
    many = {"keep_checkpoints": 10**6, "save_every": 1, "max_steps": 10**6}
    narrow = disk_line(job(published, output_dir=str(tmp_path), **many), accelerator=True)
    assert "TOO LITTLE" not in roomy and narrow.endswith(f"free at {tmp_path}, TOO LITTLE")


MEMORY = Path("/dev/shm")
other_disk = pytest.mark.skipif(
    not MEMORY.is_dir() or disk(MEMORY) == disk(Path("/tmp")), reason="no second disk"
)


@other_disk
def test_only_files_of_the_same_disk_are_beside_what_is_swapped(published: Path, tmp_path: Path) -> None:
    asked = job(published, output_dir=str(MEMORY / "nowhere"), cache_dir=str(tmp_path))
    files = written(asked, accelerator=True)
    assert on_its_disk(ONE, asked, tmp_path / "swap").files == files.cache > 0
    assert on_its_disk(ONE, asked, MEMORY / "swap").files == files.output
    assert on_its_disk(ONE, asked, None).files == written(asked, accelerator=True).whole


@other_disk
@pytest.mark.usefixtures("quiet_logging")
def test_plan_looks_at_the_disks_that_the_run_names(
    wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--teacher_path", str(wan1), "--data_path", "tiny", "--height", "32", "--width", "32"]
    assert (
        main(["plan", *words, "--output_dir", str(tmp_path / "x"), "--cache_dir", str(MEMORY / "nowhere")])
        == 0
    )
    said = capsys.readouterr().err
    assert f"of the disk of {MEMORY / 'nowhere'} (" in said and said.count("of the disk of ") > 1


@pytest.mark.usefixtures("quiet_logging")
def test_plan_counts_files_and_says_what_fewer_checkpoints_bring(
    published: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [
        "--teacher_path",
        str(published / "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
        "--data_path",
        str(published / "prompts.txt"),
        "--gpus",
        "8",
        "--gpu_memory",
        "80",
        "--host_memory",
        "1000",
        "--max_steps",
        "5000",
    ]
    each = written(job(published, "Wan2.1-T2V-14B"), accelerator=True).checkpoint / GIB
    assert main(["plan", *words, "--disk", "2000"]) == 0 and "does NOT fit" not in capsys.readouterr().err
    assert main(["plan", *words, "--disk", "300"]) == 0
    assert (
        "GiB of disk (30.0 of them kept in reserve) leave. "
        f"--keep_checkpoints 1 takes {2 * each:.1f} GiB less" in (capsys.readouterr().err)
    )


def test_the_student_is_in_two_bytes(published: Path) -> None:
    asked = job(published, student_config=read_json("ds_configs/students/half.json"))
    assert written(asked, accelerator=True).student == 2 * count_parameters(asked.student_transformer)
