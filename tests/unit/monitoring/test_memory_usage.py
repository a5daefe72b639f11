"""The memory that a process says it holds, against memory that is taken and given back."""

import json
import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import environment
from recipes import recipe, train

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.monitoring import memory_usage
from wandistiller.monitoring.memory_usage import Usage, in_gib, read, within, worst
from wandistiller.training.prepare import prepare
from wandistiller.utils.logging import current
from wandistiller.utils.system_memory import GIB

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
    monkeypatch.setattr(memory_usage, "peaks", {})
    monkeypatch.setattr(current, "phase", "start")


def test_what_is_held_is_counted_and_what_was_held_is_in_the_peak() -> None:
    with within("before"):
        before = read()
        with Held():
            during = read()
        after = read()
    assert during.host - before.host == pytest.approx(BLOCK, rel=0.05)
    assert after.host - before.host < BLOCK / 10
    assert after.host_peak - before.host == pytest.approx(BLOCK, rel=0.05)


def test_each_phase_has_its_greatest_peak_and_the_one_around_it_goes_on() -> None:
    with within("outer"):
        with within("inner"), Held():
            pass
        with within("inner"):
            pass
        assert current.phase == "outer"
    with within("after"):
        pass
    inner, outer, after = (memory_usage.peaks[phase].host_peak for phase in ("inner", "outer", "after"))
    assert inner - outer == pytest.approx(BLOCK, rel=0.1) == inner - after


def test_after_an_error_the_phase_is_still_named() -> None:
    with pytest.raises(ValueError, match="inside"), within("prepare"):
        raise ValueError("inside")
    assert current.phase == "prepare"


RANKS = [Usage(host=GIB, host_peak=2 * GIB), Usage(host=GIB, host_peak=3 * GIB)]
GPUS = [Usage(GIB, 9 * GIB, GIB, 2 * GIB, 5 * GIB), Usage(GIB, GIB, GIB, 2 * GIB, 4 * GIB)]


def test_the_worst_rank_has_the_greatest_peak_of_the_accelerator_or_else_of_the_host() -> None:
    assert in_gib(RANKS) == {"host": [1, 1], "host_peak": [2, 3]} and worst(RANKS) == (1, 3 * GIB)
    assert in_gib(GPUS)["peak"] == [5, 4] and worst(GPUS) == (0, 5 * GIB)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> Path:
    """Of a run on two ranks: 4 steps, a checkpoint and pictures after the second."""
    folder = tmp_path_factory.mktemp("usage")
    return train(folder, wan1, max_steps=4, save_every=2, sample_every=2)


def lines(output: Path) -> list[dict]:
    return [json.loads(line)["memory_gib"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_every_step_has_what_each_rank_holds_and_held_at_most(output: Path) -> None:
    for memory in lines(output):
        now, most = (memory["train"][kind] for kind in ("host", "host_peak"))
        assert len(now) == len(most) == 2 and all(0.1 < a <= b for a, b in zip(now, most, strict=True))


def test_a_teacher_that_is_loaded_to_fill_the_cache_belongs_to_that_phase(
    tmp_path: Path, wan1: Path, one_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice when memory runs out there must not speak of a student that is not there yet."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("wandistiller.training.prepare.build_teacher", fail)
    with pytest.raises(MemoryError):
        prepare(read_job(RunConfig(**recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"))), 1))
    assert current.phase == "prepare"


def test_other_phases_are_in_the_line_after_them_and_all_peaks_are_left_at_the_end(output: Path) -> None:
    first, second, third, fourth = (set(memory) for memory in lines(output))
    assert first == {"start", "prepare", "load", "train"} and second == fourth == {"train"}
    assert third >= {"train", "checkpoint", "draw"}
    found = json.loads((output / "memory.json").read_text())
    assert found.keys() >= {"prepare", "load", "train", "checkpoint", "draw", "export"}
    ranks = {phase: len(kinds["host_peak"]) for phase, kinds in found.items()}
    assert ranks == dict.fromkeys(found, 2) | {"export": 1}  # which rank 0 does alone


def test_the_step_s_line_names_the_worst_rank(output: Path) -> None:
    (line,) = (x for x in (output / "logs" / "rank_0.log").read_text().splitlines() if "step 4/4" in x)
    peaks = lines(output)[3]["train"]["host_peak"]
    assert peaks[int(re.search(r" GiB on rank (\d)  ", line)[1])] == max(peaks)


def test_memory_does_not_grow(tmp_path: Path, wan1: Path) -> None:
    """By 1 % from the first hundredth step on; tests/bench/leak.py has 2,000."""
    output = train(tmp_path, wan1, ranks=1, max_steps=150, save_every=50, sample_every=50)
    held = [memory["train"]["host"][0] for memory in lines(output)]
    assert held[-1] < 1.01 * held[99]


COLLECTIVES = """
import torch
from wandistiller.distributed import collectives
from wandistiller.monitoring import memory_usage
collectives.init("warning")
t = torch.ones(4)
torch.distributed.all_reduce(t)
before = memory_usage.read().host
for _ in range(2000):
    torch.distributed.all_reduce(t)
print("KiB:", (memory_usage.read().host - before) // 1024)
"""


def test_collectives_leave_nothing_behind() -> None:
    """torch's record of them was 1.8 MiB after 2,000."""
    command = [sys.executable, "-c", COLLECTIVES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert int(done.stdout.partition("KiB:")[2]) < 500, done.stdout + done.stderr
