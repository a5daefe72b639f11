"""Full disks, folders that go away or change under a run: a clear message, and the same command goes on."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_run import background_run
from checkpointed import STEPS, equal, flip_a_bit, saved, settings, trained
from ranks import train_words, wandistiller, write_json

from wandistiller.checkpoint import manifest

pytestmark = pytest.mark.slow


def recipe_file(folder: Path, wan: Path, name: str, **more: object) -> Path:
    return write_json(folder / f"{name}.json", settings(folder, wan, name, **more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> Path:
    """Folder of a finished run of 6 steps, `whole`, with its checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("disk")
    wandistiller("train", "--recipe", recipe_file(folder, wan1, "whole"))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("no file system may be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Leave `left` bytes."""
    space = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - left))
    return ballast


def test_a_full_disk_ends_the_run_with_74_and_the_same_command_goes_on(
    small_disk: Path, folder: Path, wan1: Path
) -> None:
    """First in the cache, then in the second checkpoint; at the end nothing differs."""
    file = recipe_file(small_disk, wan1, "run")
    ballast = fill(small_disk, 28_000)
    output = wandistiller("train", "--recipe", file, code=74).stderr
    assert re.search(rf"error: .*{small_disk}/run/cache/.*No space left on device.*\n", output), output
    assert output.count("error: ") == 1 and "same command" in output and "Traceback" not in output
    assert not list((small_disk / "run" / "cache").rglob("*.tmp"))

    checkpoint_bytes = sum(f.stat().st_size for f in saved(folder / "whole", 2).rglob("*"))
    ballast.unlink()
    ballast = fill(small_disk, 600_000 + checkpoint_bytes * 3 // 2)
    output = wandistiller("train", "--recipe", file, code=74).stderr
    assert re.search(rf"error: {small_disk}/run/checkpoints.*step 4 .*No space left on device", output), (
        output
    )
    assert output.count("error: ") == 1 and "Free space" in output and "Traceback" not in output
    assert [p.name for p in manifest.steps(small_disk / "run" / "checkpoints")] == ["step_00000002"]

    ballast.unlink()
    assert "2 of 6 steps are done" in wandistiller("train", "--recipe", file).stderr
    assert equal(trained(small_disk / "run"), trained(folder / "whole"))


def test_a_cache_deleted_in_training_is_named_and_made_anew_by_the_same_command(
    folder: Path, wan1: Path
) -> None:
    file = recipe_file(folder, wan1, "deleted", log_level="debug")
    with background_run(train_words(file), folder / "deleted.log") as run:
        run.wait_for(f"step 3/{STEPS} ")
        shutil.rmtree((folder / "deleted" / "cache").rename(folder / "gone"))  # all of it at once
        code, output = run.end(), run.output()
    assert code == 74 and re.search(rf"error: .*{folder}/deleted/cache/", output), output
    assert "Traceback" not in output
    assert re.search("[24] of 6 steps are done", wandistiller("train", "--recipe", file).stderr)
    assert equal(trained(folder / "deleted"), trained(folder / "whole"))


def test_a_cache_that_one_rank_alone_finds_damaged_ends_both_with_its_message(
    folder: Path, wan1: Path
) -> None:
    file = recipe_file(folder, wan1, "flipped", max_steps=400, save_every=400)
    with background_run(train_words(file, ranks=2), folder / "flipped.log") as run:
        run.wait_for("step 3/400 ")
        (made,) = (folder / "flipped" / "cache" / "latents").iterdir()
        damaged = sorted(made.glob("*.safetensors"))[0]
        flip_a_bit(damaged)
        code, output = run.end(), run.output()
    ours = output.partition("torch/distributed/elastic")[0]  # before torchrun's own lines and exit code 1
    assert code == 1 and "Traceback" not in ours, output
    assert len(re.findall(rf"^error: {damaged}: .* does not have the checksum", ours, re.MULTILINE)) == 1, (
        output
    )


def test_a_teacher_that_went_away_before_the_end_is_named_and_the_run_goes_on_when_it_is_back(
    folder: Path, wan1: Path, copy_of: Callable[..., Path]
) -> None:
    teacher = copy_of(wan1, weights=True)
    cache = {"cache_dir": str(folder / "whole" / "cache")}
    file = recipe_file(folder, teacher, "away", log_level="debug", **cache)
    with background_run(train_words(file), folder / "away.log") as run:
        run.wait_for(f"step 3/{STEPS} ")
        teacher.rename(teacher.with_name("away"))
        code, output = run.end(), run.output()
    assert code == 74 and re.search(rf"error: .*drawing pictures after step 6: .*{teacher}", output), output
    assert "Traceback" not in output
    teacher.with_name("away").rename(teacher)
    wandistiller("train", "--recipe", file)
    assert equal(trained(folder / "away"), trained(folder / "whole"))
    assert (folder / "away" / "DONE").exists() and (
        folder / "away" / "samples" / "step_00000006.png"
    ).exists()
