"""Damaged checkpoints, full disks, folders that go away or change under a run: a clear message, and nothing is lost."""

import ast
import dataclasses
import json
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from live import live
from ranks import ROOT, environment, launcher, wandistiller, write_json
from recipes import recipe

from wandistiller import checkpoint, manifest, resume
from wandistiller.__main__ import main
from wandistiller.batch import Expert
from wandistiller.check import read_job
from wandistiller.config import RunConfig
from wandistiller.export import export
from wandistiller.files import atomic, lock, sweep
from wandistiller.prepare import guided_teacher, prepare
from wandistiller.problems import ConfigError, StorageError
from wandistiller.shards import Shards
from wandistiller.stream import stamp_of
from wandistiller.train import build_student
from wandistiller.trainer import Trainer

STEPS = 6
SETTINGS = {"max_steps": STEPS, "save_every": 2, "keep_checkpoints": 3, "sample_prompts": ["a red circle"], "rollout_steps": 2}
WEIGHTS = "transformer/rank_00000.safetensors"


def settings(folder: Path, wan: Path, name: str, **more: object) -> dict:
    """A recipe whose output, with its cache, is `folder`/`name`."""
    own = {"output_dir": str(folder / name), "cache_dir": str(folder / name / "cache")}
    return recipe(folder, wan, **SETTINGS | own | more)


def trainer(given: dict) -> Trainer:
    """As `wandistiller train` makes it, with the checkpoint that it goes on from."""
    job = read_job(RunConfig(**given), world=1)
    job = dataclasses.replace(job, resume_from=resume.verified(job.output, job.run.resume))
    data, text, teacher = prepare(job)
    return Trainer(job, data, text, teacher or guided_teacher(job, text), build_student(job))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, wan1: Path, one_rank: torch.device) -> Path:
    """Where a run of 6 steps, `whole`, left its checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("files")
    trainer(settings(folder, wan1, "whole")).train()
    return folder


@pytest.fixture
def cut(folder: Path, tmp_path: Path) -> Path:
    """A copy of that output, to be damaged."""
    return Path(shutil.copytree(folder / "whole", tmp_path / "run"))


def saved(output: Path, step: int) -> Path:
    return output / "checkpoints" / f"step_{step:08d}"


def trained(output: Path) -> dict[str, torch.Tensor]:
    return dict(checkpoint.weights(saved(output, STEPS), Expert.HIGH_NOISE))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def copy_beside(file: Path) -> None:
    shutil.copy(file, file.with_name("rank_00001.safetensors"))


def write_an_unknown_size(file: Path) -> None:
    content = json.loads(file.read_text())
    content["files"][WEIGHTS]["bytes"] = None
    file.write_text(json.dumps(content))


DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut off": (WEIGHTS, cut_off, r"rank_00000.safetensors has \d+ bytes of \d+"),
    "flipped": (WEIGHTS, flip_a_bit, "rank_00000.safetensors is not as it was written"),
    "missing": (WEIGHTS, Path.unlink, "rank_00000.safetensors cannot be read: No such file"),
    "too much": (WEIGHTS, copy_beside, "rank_00001.safetensors is none of its files"),
    "state cut off": ("run_state.json", cut_off, r"run_state.json has \d+ bytes of \d+"),
    "state flipped": ("run_state.json", flip_a_bit, "run_state.json is not as it was written"),
    "engine flipped": ("transformer/engine.json", flip_a_bit, "engine.json is not as it was written"),
    "no manifest": ("manifest.json", Path.unlink, "it has no manifest.json"),
    "manifest cut off": ("manifest.json", cut_off, "its manifest.json cannot be read"),
    "manifest empty": ("manifest.json", lambda file: file.write_text(""), "its manifest.json cannot be read"),
    "manifest of another form": ("manifest.json", lambda file: file.write_text("[1]"), "its manifest.json cannot be read"),
    "manifest without sizes": ("manifest.json", write_an_unknown_size, r"rank_00000.safetensors has \d+ bytes of None"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_is_passed_over_and_the_reason_said(
    damage: str, cut: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, spoil, reason = DAMAGE[damage]
    spoil(saved(cut, 6) / name)
    with caplog.at_level(logging.INFO, "wandistiller"):
        assert resume.verified(cut, "auto") == saved(cut, 4)
    assert re.search(rf"skipped   {saved(cut, 6)}: .*{reason}", caplog.text)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_that_was_named_is_refused(damage: str, cut: Path) -> None:
    name, spoil, reason = DAMAGE[damage]
    spoil(saved(cut, 4) / name)
    with pytest.raises(ConfigError, match=reason):
        resume.verified(cut, str(saved(cut, 4)))


def test_a_damaged_state_does_not_mislead_the_check_before_the_start(cut: Path, folder: Path, wan1: Path) -> None:
    flip_a_bit(saved(cut, 6) / "run_state.json")
    job = read_job(RunConfig(**settings(folder, wan1, "whole", output_dir=str(cut))), world=1)
    assert job.resume_from == saved(cut, 4)


def test_all_damaged_are_named_with_every_reason_and_the_command_ends_with_2(
    cut: Path, wan1: Path, folder: Path, one_rank: object, capsys: pytest.CaptureFixture, quiet_logging: None
) -> None:
    for step, damage in ((2, "flipped"), (4, "no manifest"), (6, "cut off")):
        name, spoil, _ = DAMAGE[damage]
        spoil(saved(cut, step) / name)
    given = settings(folder, wan1, "whole", output_dir=str(cut))
    assert main(["train", "--recipe", str(write_json(cut / "r.json", given))]) == 2
    said = capsys.readouterr().err
    assert "step_00000002: transformer/rank_00000.safetensors is not as it was written" in said
    assert "step_00000004: it has no manifest.json" in said and re.search(r"step_00000006: .* bytes of \d+", said)
    assert "`--resume never` starts anew and keeps them" in said and "Traceback" not in said


def test_a_run_goes_on_from_the_one_before_sets_the_damaged_aside_and_ends_equal(
    cut: Path, folder: Path, wan1: Path, one_rank: object
) -> None:
    flip_a_bit(saved(cut, 6) / WEIGHTS)
    trainer(settings(folder, wan1, "whole", output_dir=str(cut))).train()
    assert equal(trained(cut), trained(folder / "whole"))
    assert (cut / "checkpoints" / "aside_step_00000006").is_dir()
    assert [row["step"] for row in map(json.loads, (cut / "metrics.jsonl").read_text().splitlines())] == [1, 2, 3, 4, 5, 6]


def test_an_earlier_checkpoint_can_be_named_and_newer_ones_are_set_aside(
    cut: Path, folder: Path, wan1: Path, one_rank: object
) -> None:
    trainer(settings(folder, wan1, "whole", output_dir=str(cut), resume=str(saved(cut, 2)))).train()
    assert equal(trained(cut), trained(folder / "whole"))
    names = {p.name for p in (cut / "checkpoints").glob("aside_*")}
    assert names == {"aside_step_00000004", "aside_step_00000006"}


def test_rotation_never_deletes_the_last_good_one(cut: Path) -> None:
    for step in (4, 6):
        flip_a_bit(saved(cut, step) / WEIGHTS)
    manifest.settle(resume.verified(cut, "auto"), 1)
    assert resume.verified(cut, "auto") == saved(cut, 2)


@pytest.mark.parametrize("latest", ["", "step_00000004\n", "nonsense"])
def test_latest_is_for_people_and_is_mended(latest: str, cut: Path) -> None:
    (cut / "checkpoints" / "latest").write_text(latest)
    found = resume.verified(cut, "auto")
    manifest.settle(found, 3)
    assert found == saved(cut, 6) and (cut / "checkpoints" / "latest").read_text() == "step_00000006\n"


def test_half_a_checkpoint_is_no_checkpoint_and_is_swept(cut: Path) -> None:
    half = saved(cut, 6).rename(cut / "checkpoints" / ".step_00000006.tmp")
    (half / "manifest.json").unlink()
    assert resume.verified(cut, "auto") == saved(cut, 4)
    manifest.sweep(cut / "checkpoints")
    assert not half.exists()


def test_half_a_file_of_a_process_that_is_gone_is_swept_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    words = "import os, sys; from pathlib import Path; from wandistiller.files import atomic; " \
            "f = atomic(Path(sys.argv[1])).__enter__(); f.write_text('half'); os._exit(0)"  # fmt: skip
    subprocess.run([sys.executable, "-c", words, str(tmp_path / "cache" / "a")], env=environment(), check=True)
    with atomic(tmp_path / "cache" / "b") as mine:
        mine.write_text("whole")
        assert len(list((tmp_path / "cache").iterdir())) == 2
        sweep(tmp_path)
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
    cut: Path, folder: Path, wan1: Path, one_rank: object
) -> None:
    there = trainer(settings(folder, wan1, "whole", output_dir=str(cut)))
    there._resumed()
    before = sorted(os.listdir(cut / "checkpoints"))
    with files_up_to(10_000), pytest.raises(StorageError, match=r"the checkpoint of step 8 could not be written: .*too large"):
        checkpoint.save(there.student, cut, 8, {}, keep=1)
    assert sorted(os.listdir(cut / "checkpoints")) == before
    assert checkpoint.save(there.student, cut, 8, {}, keep=1) == saved(cut, 8)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Leave `left` bytes."""
    space = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(space.f_bavail * space.f_frsize - left))
    return ballast


def test_a_full_disk_ends_the_run_with_74_and_the_same_command_goes_on(small_disk: Path, folder: Path, wan1: Path) -> None:
    """First in the cache, then in the second checkpoint; at the end nothing differs."""
    given = settings(folder, wan1, "whole", output_dir=str(small_disk / "run"), cache_dir=str(small_disk / "run" / "cache"))
    file = write_json(folder / "full.json", given)
    ballast = fill(small_disk, 28_000)
    said = wandistiller("train", "--recipe", file, code=74).stderr
    assert re.search(rf"error: .*{small_disk}/run/cache/.*No space left on device.*\n", said), said
    assert said.count("error: ") == 1 and "same command" in said and "Traceback" not in said
    assert not list((small_disk / "run" / "cache").rglob("*.tmp"))

    checkpoint_bytes = sum(f.stat().st_size for f in saved(folder / "whole", 2).rglob("*"))
    ballast.unlink()
    ballast = fill(small_disk, 600_000 + checkpoint_bytes * 3 // 2)
    said = wandistiller("train", "--recipe", file, code=74).stderr
    assert re.search(rf"error: {small_disk}/run/checkpoints.*step 4 .*No space left on device", said), said
    assert said.count("error: ") == 1 and "Free space" in said and "Traceback" not in said
    assert [p.name for p in manifest.steps(small_disk / "run" / "checkpoints")] == ["step_00000002"]

    ballast.unlink()
    assert "2 of 6 steps are done" in wandistiller("train", "--recipe", file).stderr
    assert equal(trained(small_disk / "run"), trained(folder / "whole"))


def test_an_output_folder_in_use_is_refused_with_its_process_and_free_when_that_is_killed(
    cut: Path, folder: Path, wan1: Path, one_rank: object, capsys: pytest.CaptureFixture, quiet_logging: None
) -> None:
    words = "import sys, time; from pathlib import Path; from wandistiller.files import lock; " \
            "held = lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", words, str(cut)], stdout=subprocess.PIPE, env=environment())
    assert other.stdout.readline() == b"locked\n"
    file = write_json(cut / "r.json", settings(folder, wan1, "whole", output_dir=str(cut)))
    assert main(["train", "--recipe", str(file)]) == 2
    assert re.search(rf"error: {cut}: another run is writing there \(process {other.pid} on ", capsys.readouterr().err)
    other.kill()
    other.wait()
    lock(cut).close()


def test_a_cache_deleted_in_training_is_named_and_made_anew_by_the_same_command(folder: Path, wan1: Path) -> None:
    file = write_json(folder / "deleted.json", settings(folder, wan1, "deleted", log_level="debug"))
    with live([sys.executable, "-m", "wandistiller", "train", "--recipe", file], folder / "deleted.log") as run:
        run.wait_for(f"step 3/{STEPS} ")
        shutil.rmtree(folder / "deleted" / "cache")
        code, said = run.end(), run.said()
    assert code in (2, 74) and re.search(rf"error: .*{folder}/deleted/cache/", said) and "Traceback" not in said, said
    assert "2 of 6 steps are done" in wandistiller("train", "--recipe", file).stderr
    assert equal(trained(folder / "deleted"), trained(folder / "whole"))


def test_a_cache_that_one_rank_alone_finds_damaged_ends_both_with_its_message(folder: Path, wan1: Path) -> None:
    file = write_json(folder / "flipped.json", settings(folder, wan1, "flipped", max_steps=400, save_every=400))
    with live([*launcher(2), "-m", "wandistiller", "train", "--recipe", file], folder / "flipped.log") as run:
        run.wait_for("step 3/400 ")
        (made,) = (folder / "flipped" / "cache" / "latents").iterdir()
        damaged = sorted(made.glob("*.safetensors"))[0]
        flip_a_bit(damaged)
        code, said = run.end(), run.said()
    ours = said.partition("torch/distributed/elastic")[0]  # torchrun then has lines, and the exit code 1, of its own
    assert code == 1 and "Traceback" not in ours, said
    assert len(re.findall(rf"^error: {damaged}: .* is not what was written", ours, re.MULTILINE)) == 1, said


def change_the_cache(output: Path) -> None:
    """Write other numbers, as whole files."""
    (made,) = (output / "cache" / "latents").iterdir()
    shards = Shards(made)
    for file in made.glob("*.safetensors"):
        names = {name.partition(".")[0] for name in torch_names(file)}
        shards.find(names)
        shards.write({key: {"x0": shards.read(key, "x0")[0] + 1} for key in names}, {})


def torch_names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def test_a_cache_of_other_numbers_is_refused_unless_that_is_allowed(
    cut: Path, folder: Path, wan1: Path, one_rank: object
) -> None:
    shutil.rmtree(saved(cut, 6))
    change_the_cache(cut)
    given = settings(folder, wan1, "whole", output_dir=str(cut), cache_dir=str(cut / "cache"))
    with pytest.raises(ConfigError, match=rf"{cut}/cache: 8 of 8 samples looked at hold other numbers .*--allow_changed cache"):
        trainer(given).train()
    trainer(given | {"allow_changed": ["cache"]}).train()
    assert not equal(trained(cut), trained(folder / "whole"))
    trainer(given).train()  # the last checkpoint has learned from the new numbers


def test_a_run_made_longer_goes_on_though_it_uses_other_samples(cut: Path, folder: Path, wan1: Path, one_rank: object) -> None:
    given = settings(folder, wan1, "whole", output_dir=str(cut), cache_dir=str(cut / "cache"))
    few = trainer(given).data
    more = trainer(given | {"max_steps": 9, "rollouts_per_prompt": 1}).data
    assert few.stamps() == more.stamps(few.stamps())
    assert more.stamps(["of.another", *few.stamps()]) == few.stamps()


def test_a_teacher_that_went_away_before_the_end_is_named_and_the_run_goes_on_when_it_is_back(
    folder: Path, wan1: Path, copy_of: Callable[..., Path]
) -> None:
    teacher = copy_of(wan1, weights=True)
    given = settings(folder, teacher, "away", log_level="debug", cache_dir=str(folder / "whole" / "cache"))
    file = write_json(folder / "away.json", given)
    with live([sys.executable, "-m", "wandistiller", "train", "--recipe", file], folder / "away.log") as run:
        run.wait_for(f"step 3/{STEPS} ")
        teacher.rename(teacher.with_name("away"))
        code, said = run.end(), run.said()
    assert code == 74 and re.search(rf"error: .*drawing pictures after step 6: .*{teacher}", said), said
    assert "Traceback" not in said
    teacher.with_name("away").rename(teacher)
    wandistiller("train", "--recipe", file)
    assert equal(trained(folder / "away"), trained(folder / "whole"))
    assert (folder / "away" / "DONE").exists() and (folder / "away" / "samples" / "step_00000006.png").exists()


def test_an_export_without_the_teacher_names_it_and_leaves_nothing_half(
    folder: Path, wan1: Path, copy_of: Callable[..., Path], tmp_path: Path, cut: Path
) -> None:
    state, whole = (json.loads((saved(cut, 6) / name).read_text()) for name in ("run_state.json", "manifest.json"))
    state["facts"]["teacher_path"] = str(tmp_path / "gone")
    (saved(cut, 6) / "run_state.json").write_text(json.dumps(state))
    whole["files"]["run_state.json"] = stamp_of(saved(cut, 6) / "run_state.json")._asdict()
    (saved(cut, 6) / "manifest.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=f"{tmp_path}/gone"):
        export(saved(cut, 6), tmp_path / "student")
    assert not list(tmp_path.glob("*student*"))


CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "time.localtime"}


def test_nothing_but_a_stamp_for_people_reads_the_wall_clock() -> None:
    """A change of the clock is felt by no deadline, no duration and no order of files."""
    found = {}
    for file in (ROOT / "wandistiller").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).endswith(tuple(CLOCKS)):
                found.setdefault(file.stem, []).append(ast.unparse(node))
            if isinstance(node, ast.Attribute) and node.attr in ("st_mtime", "st_mtime_ns", "st_ctime", "st_atime"):
                found.setdefault(file.stem, []).append(node.attr)
    torch_s = {"memory_profile": ["time.time"],  # its allocator's record has the wall clock
               "builds": ["st_mtime", "time.time"]}  # its locks have no other age  # fmt: skip
    found = {name: sorted(clocks) for name, clocks in found.items()}
    assert found == {"watch": ["time.time"], "media": ["st_mtime_ns"]} | torch_s
