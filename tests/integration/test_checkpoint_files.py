"""Damaged checkpoints and folders that change under a run: a clear message, and nothing is lost."""

import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import equal, flip_a_bit, save, saved, settings, trained
from ranks import edit_json, environment, metrics, write_json
from slow_cases import slow_but
from trainers import trainer_of

from wandistiller.checkpoint import manifest, resume
from wandistiller.cli.main import main
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.distributed.shutdown import Stopped, stopping
from wandistiller.training import distil
from wandistiller.utils.errors import ConfigError, StorageError
from wandistiller.utils.files import atomic, delete_leftovers, lock

WEIGHTS = "transformer/rank_00000.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wan1: Path, one_rank: torch.device) -> Path:
    """Folder of a finished run of 6 steps, `whole`, with its checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("files")
    trainer_of(settings(folder, wan1, "whole")).train()
    return folder


@pytest.fixture
def cut(folder: Path, tmp_path: Path) -> Path:
    """A copy of that output, to be damaged."""
    return Path(shutil.copytree(folder / "whole", tmp_path / "run"))


@pytest.fixture
def again(cut: Path, folder: Path, wan1: Path) -> dict[str, Any]:
    """The recipe of that run, with the copy as its output."""
    return settings(folder, wan1, "whole", output_dir=str(cut))


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def copy_beside(file: Path) -> None:
    shutil.copy(file, file.with_name("rank_00001.safetensors"))


def write_an_unknown_size(file: Path) -> None:
    files = json.loads(file.read_text())["files"]
    edit_json(file, files=files | {WEIGHTS: files[WEIGHTS] | {"bytes": None}})


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut off": (WEIGHTS, cut_off, r"rank_00000.safetensors has \d+ bytes of \d+"),
    "flipped": (WEIGHTS, flip_a_bit, "rank_00000.safetensors is not as it was written"),
    "missing": (WEIGHTS, Path.unlink, "rank_00000.safetensors cannot be read: No such file"),
    "too much": (WEIGHTS, copy_beside, "rank_00001.safetensors is none of its files"),
    "state flipped": ("run_state.json", flip_a_bit, "run_state.json is not as it was written"),
    "engine flipped": ("transformer/engine.json", flip_a_bit, "engine.json is not as it was written"),
    "no manifest": ("manifest.json", Path.unlink, "it has no manifest.json"),
    "manifest cut off": ("manifest.json", cut_off, "its manifest.json cannot be read"),
    "another manifest": ("manifest.json", lambda f: f.write_text("[1]"), "manifest.json cannot be read"),
    "no sizes": ("manifest.json", write_an_unknown_size, r"rank_00000.safetensors has \d+ bytes of None"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over_with_its_reason_and_refused_where_it_was_named(
    damage: str, cut: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, spoil, reason = DAMAGE[damage]
    spoil(saved(cut, 6) / name)
    with caplog.at_level(logging.INFO, "wandistiller"):
        assert resume.latest_valid(cut, "auto") == saved(cut, 4)
    assert re.search(rf"skipped   {saved(cut, 6)}: .*{reason}", caplog.text)
    with pytest.raises(ConfigError, match=reason):
        resume.latest_valid(cut, str(saved(cut, 6)))


def test_a_damaged_state_does_not_mislead_the_check_before_the_start(
    cut: Path, again: dict[str, Any]
) -> None:
    flip_a_bit(saved(cut, 6) / "run_state.json")
    assert read_job(RunConfig(**again), world=1).resume_from == saved(cut, 4)


def test_all_damaged_are_named_with_every_reason_and_the_command_ends_with_2(
    cut: Path, again: dict[str, Any], capsys: pytest.CaptureFixture, quiet_logging: None
) -> None:
    for step, damage in ((2, "flipped"), (4, "no manifest"), (6, "cut off")):
        name, spoil, _ = DAMAGE[damage]
        spoil(saved(cut, step) / name)
    assert main(["train", "--recipe", str(write_json(cut / "r.json", again))]) == 2
    error = capsys.readouterr().err
    assert "step_00000002: transformer/rank_00000.safetensors is not as it was written" in error
    assert "step_00000004: it has no manifest.json" in error
    assert re.search(r"step_00000006: .* bytes of \d+", error)
    assert "`--resume never` begins from step 0 and keeps them" in error and "Traceback" not in error


def test_a_run_goes_on_from_the_one_before_sets_the_damaged_aside_mends_its_metrics_and_ends_equal(
    cut: Path, folder: Path, again: dict[str, Any]
) -> None:
    flip_a_bit(saved(cut, 6) / WEIGHTS)
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:4]) + '{"step": 5, "lo')  # a kill while it was written
    trainer_of(again).train()
    assert equal(trained(cut), trained(folder / "whole"))
    assert (cut / "checkpoints" / "aside_step_00000006").is_dir()
    assert [line["step"] for line in metrics(cut)] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_stopped_before_it_has_gone_on_from_an_earlier_checkpoint_does_so_by_auto(
    cut: Path, again: dict[str, Any]
) -> None:
    job = read_job(RunConfig(**again | {"resume": str(saved(cut, 2))}), 1)
    stopping.request_stop("SIGTERM")
    try:
        with pytest.raises(Stopped):
            distil.run([job], lambda _: None)
    finally:
        stopping.release()
    assert resume.latest_valid(cut, "auto") == saved(cut, 2)


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("auto", ""),
        ("never", " with --resume auto"),
        ("own/checkpoints/step_00000002", " with --resume auto"),
        ("other/checkpoints/step_00000002", ""),
    ],
)
def test_a_stopped_run_names_the_command_that_goes_on(given: str, flags: str, tmp_path: Path) -> None:
    """From a checkpoint elsewhere the first command does, until there is one here."""
    output = tmp_path / given.partition("/")[0].replace("other", "new")
    named = tmp_path / given
    named.mkdir(parents=True)
    assert resume.going_on(output, str(named) if "/" in given else given) == (
        f"the same command{flags} goes on from there"
    )


@pytest.mark.parametrize("latest", ["", "step_00000004\n", "nonsense"])
def test_latest_is_for_people_and_is_mended(latest: str, cut: Path) -> None:
    (cut / "checkpoints" / "latest").write_text(latest)
    found = resume.latest_valid(cut, "auto")
    manifest.rotate(found, 3)
    assert found == saved(cut, 6) and (cut / "checkpoints" / "latest").read_text() == "step_00000006\n"


def test_half_a_checkpoint_is_swept_and_rotation_never_deletes_the_last_good_one(cut: Path) -> None:
    half = saved(cut, 6).rename(cut / "checkpoints" / ".step_00000006.tmp")
    (half / "manifest.json").unlink()
    assert resume.latest_valid(cut, "auto") == saved(cut, 4)
    manifest.remove_temporaries(cut / "checkpoints")
    assert not half.exists()
    flip_a_bit(saved(cut, 4) / WEIGHTS)
    manifest.rotate(resume.latest_valid(cut, "auto"), 1)
    assert resume.latest_valid(cut, "auto") == saved(cut, 2)


def test_half_a_file_of_a_process_that_is_gone_is_swept_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    words = (
        "import os, sys; from pathlib import Path; from wandistiller.utils.files import atomic; "
        "f = atomic(Path(sys.argv[1])).__enter__(); f.write_text('half'); os._exit(0)"
    )
    command = [sys.executable, "-c", words, str(tmp_path / "cache" / "a")]
    subprocess.run(command, env=environment(), check=True)
    with atomic(tmp_path / "cache" / "b") as mine:
        mine.write_text("whole")
        assert len(list((tmp_path / "cache").iterdir())) == 2
        delete_leftovers(tmp_path)
        assert list((tmp_path / "cache").iterdir()) == [mine]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The system refuses to let any file of this process grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_checkpoint_that_cannot_be_written_leaves_those_before_and_nothing_half(
    cut: Path, again: dict[str, Any]
) -> None:
    there = trainer_of(again)
    there.resume()
    before = sorted(os.listdir(cut / "checkpoints"))
    refused = pytest.raises(StorageError, match=r"the checkpoint of step 8 could not be written: .*too large")
    with files_up_to(10_000), refused:
        save(there.student, cut, 8)
    assert sorted(os.listdir(cut / "checkpoints")) == before
    assert save(there.student, cut, 8) == saved(cut, 8)


def test_all_files_of_a_checkpoint_are_flushed_and_training_waits_for_none(
    cut: Path, again: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, fsync = trainer_of(again), os.fsync
    there.resume()
    threads: dict[str, threading.Thread] = {}

    def flush(descriptor: int) -> None:
        threads[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = threading.current_thread()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    folder = save(there.student, cut, 8)
    files = {file.name for file in folder.rglob("*") if file.is_file()} - {"manifest.json"}
    assert {"run_state.json", "engine.json"} < files <= threads.keys()
    assert threading.main_thread() not in threads.values()


def test_an_output_folder_in_use_is_refused_with_its_process_and_free_when_that_is_killed(
    cut: Path, again: dict[str, Any], capsys: pytest.CaptureFixture, quiet_logging: None
) -> None:
    words = (
        "import sys, time; from pathlib import Path; from wandistiller.utils.files import lock; "
        "held = lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", words, str(cut)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
    assert other.stdout.readline() == b"locked\n"
    assert main(["train", "--recipe", str(write_json(cut / "r.json", again))]) == 2
    error = capsys.readouterr().err
    assert re.search(rf"error: {cut}: another run is writing there \(process {other.pid} on ", error)
    other.kill()
    other.wait()
    lock(cut).close()


@pytest.mark.parametrize("format_", slow_but(["diffusers"], ["diffusers", "original"]))
@pytest.mark.parametrize("name", ["transformer/rank_00000.safetensors", "transformer/engine.json"])
def test_an_export_of_damaged_weights_is_refused_and_names_another_checkpoint(
    tmp_path: Path, cut: Path, name: str, format_: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(manifest, "SMALL_BYTES", 10_000)  # as large as weights are, for this run's
    flip_a_bit(saved(cut, 6) / name)
    output = tmp_path / "student.safetensors"
    words = ["export", "--checkpoint", str(saved(cut, 6)), "--output", str(output), "--format", format_]
    assert main(words) == 2 and not output.exists()
    error = capsys.readouterr().err
    assert f"{name} is not as it was written" in error and f"such as {saved(cut, 4)}" in error


def test_a_run_does_not_start_from_the_damaged_weights_of_another(
    cut: Path, again: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "SMALL_BYTES", 10_000)
    for step in (2, 4):
        shutil.rmtree(saved(cut, step))
    flip_a_bit(saved(cut, 6) / WEIGHTS)
    start = {"output_dir": str(tmp_path / "next"), "student_config": {"init": str(cut)}}
    with pytest.raises(ConfigError, match="rank_00000.safetensors is not as it was written"):
        trainer_of(again | start)
