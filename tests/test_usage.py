"""The memory that a process says it holds, against memory that is taken and given back."""

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment, wandistiller, write_json
from recipes import recipe

from wandistiller import phase, usage
from wandistiller.check import read_job
from wandistiller.config import RunConfig
from wandistiller.prepare import prepare
from wandistiller.usage import GIB, Usage, in_gib, read, within, worst

BLOCK = 2**28


class Held:
    """Memory that is really touched, and gone when it is closed."""

    def __enter__(self) -> None:
        self.memory = mmap.mmap(-1, BLOCK)
        for _ in range(256):
            self.memory.write(b"1" * (BLOCK // 256))

    def __exit__(self, *_: object) -> None:
        self.memory.close()


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "peaks", {})
    monkeypatch.setattr(phase.now, "phase", "start")


def test_what_is_held_is_counted_and_what_was_held_is_in_the_peak() -> None:
    with within("before"):
        before = read()
        with Held():
            during = read()
        after = read()
    assert during.host - before.host == pytest.approx(BLOCK, rel=0.05)
    assert after.host - before.host < BLOCK / 10
    assert after.host_peak - before.host == pytest.approx(BLOCK, rel=0.05)


def test_each_phase_has_a_peak_of_its_own() -> None:
    with within("first"), Held():
        pass
    with within("second"):
        pass
    first, second = usage.peaks["first"], usage.peaks["second"]
    assert first.host_peak - second.host_peak == pytest.approx(BLOCK, rel=0.1)


def test_a_phase_that_comes_again_keeps_the_greatest_and_the_one_around_it_goes_on() -> None:
    with within("outer"):
        with within("inner"), Held():
            pass
        with within("inner"):
            pass
        assert phase.now.phase == "outer"
    assert usage.peaks["inner"].host_peak - usage.peaks["outer"].host_peak == pytest.approx(BLOCK, rel=0.1)


def test_after_an_error_the_phase_is_still_named() -> None:
    with pytest.raises(ValueError, match="inside"), within("prepare"):
        raise ValueError("inside")
    assert phase.now.phase == "prepare"


RANKS = [Usage(host=GIB, host_peak=2 * GIB), Usage(host=GIB, host_peak=3 * GIB)]
GPUS = [Usage(GIB, 9 * GIB, GIB, 2 * GIB, 5 * GIB), Usage(GIB, GIB, GIB, 2 * GIB, 4 * GIB)]


def test_numbers_of_an_accelerator_are_left_out_where_there_is_none() -> None:
    assert in_gib(RANKS) == {"host": [1, 1], "host_peak": [2, 3]}
    assert in_gib(GPUS)["peak"] == [5, 4]


def test_the_worst_rank_is_that_with_the_greatest_peak_of_the_accelerator_or_else_of_the_host() -> None:
    assert worst(RANKS) == (1, 3 * GIB)
    assert worst(GPUS) == (0, 5 * GIB)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> Path:
    """Of a run on two ranks: 4 steps, a checkpoint and pictures after the second."""
    folder = tmp_path_factory.mktemp("usage")
    given = recipe(folder, wan1, output_dir=str(folder / "run"), max_steps=4, save_every=2, sample_every=2)
    wandistiller("train", "--recipe", write_json(folder / "r.json", given), ranks=2)
    return folder / "run"


def lines(output: Path) -> list[dict]:
    return [json.loads(line)["memory_gib"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_every_step_has_what_each_rank_holds_and_held_at_most(output: Path) -> None:
    for memory in lines(output):
        assert all(0.1 < now <= most for now, most in zip(memory["train"]["host"], memory["train"]["host_peak"], strict=True))
        assert len(memory["train"]["host"]) == 2


def test_a_teacher_that_is_loaded_to_fill_the_cache_belongs_to_that_phase(
    tmp_path: Path, wan1: Path, one_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice when memory runs out there must not speak of a student that is not there yet."""
    seen = []

    def look(*_: object) -> None:
        seen.append(phase.now.phase)
        raise MemoryError

    monkeypatch.setattr("wandistiller.prepare.build_teacher", look)
    with pytest.raises(MemoryError):
        prepare(read_job(RunConfig(**recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"))), 1))
    assert seen == ["prepare"] and phase.now.phase == "prepare"


def test_other_phases_are_in_the_line_after_them(output: Path) -> None:
    first, second, third, fourth = (set(memory) for memory in lines(output))
    assert first == {"start", "prepare", "load", "train"} and second == fourth == {"train"}
    assert third >= {"train", "checkpoint", "draw"}


def test_the_run_leaves_the_peaks_of_its_phases(output: Path) -> None:
    found = json.loads((output / "memory.json").read_text())
    assert {"prepare", "load", "train", "checkpoint", "draw", "export"} <= set(found)
    ranks = {phase: len(kinds["host_peak"]) for phase, kinds in found.items()}
    assert ranks == dict.fromkeys(found, 2) | {"export": 1}  # which rank 0 does alone


def test_the_step_s_line_names_the_worst_rank(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=1)
    said = wandistiller("train", "--recipe", write_json(tmp_path / "r.json", given)).stderr
    assert " GiB on rank 0  " in next(line for line in said.splitlines() if line.startswith("step 1/1"))


def test_memory_does_not_grow(tmp_path: Path, wan1: Path) -> None:
    """By 1 % from the first hundredth step on; tests/bench/leak.py has 2,000."""
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), max_steps=150, save_every=50, sample_every=50)
    wandistiller("train", "--recipe", write_json(tmp_path / "r.json", given))
    held = [memory["train"]["host"][0] for memory in lines(tmp_path / "run")]
    assert held[-1] < 1.01 * held[99]


COLLECTIVES = """
import torch
from wandistiller import distributed, usage
distributed.init("warning")
t = torch.ones(4)
torch.distributed.all_reduce(t)
before = usage.read().host
for _ in range(2000):
    torch.distributed.all_reduce(t)
print("KiB:", (usage.read().host - before) // 1024)
"""


def test_collectives_leave_nothing_behind() -> None:
    """torch's record of them was 1.8 MiB after 2,000."""
    done = subprocess.run([sys.executable, "-c", COLLECTIVES], capture_output=True, text=True, env=environment())
    assert int(done.stdout.partition("KiB:")[2]) < 500, done.stdout + done.stderr
