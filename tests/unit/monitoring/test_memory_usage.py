"""Measured memory of a process that allocates and frees a known number of bytes."""

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from recipes import recipe

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.monitoring import memory_usage
from wandistiller.monitoring.memory_usage import Usage, in_gib, read, within, worst
from wandistiller.training.prepare import prepare
from wandistiller.utils.logging import current
from wandistiller.utils.system_memory import GIB

BLOCK = 2**28


@contextmanager
def allocated() -> Iterator[None]:
    """Allocate BLOCK bytes, touch them all, and free them at the end."""
    with mmap.mmap(-1, BLOCK) as memory:
        for _ in range(256):
            memory.write(b"1" * (BLOCK // 256))
        yield


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_usage, "peaks", {})
    monkeypatch.setattr(current, "phase", "start")


def test_allocated_memory_is_counted_and_freed_memory_is_in_the_peak() -> None:
    with within("before"):
        before = read()
        with allocated():
            during = read()
        after = read()
    assert during.host - before.host == pytest.approx(BLOCK, rel=0.05)
    assert after.host - before.host < BLOCK / 10
    assert after.host_peak - before.host == pytest.approx(BLOCK, rel=0.05)


def test_pages_of_a_mapped_file_are_not_memory_of_the_process() -> None:
    """A library of hundreds of MB, as a file of weights is mapped."""
    largest = max(Path(torch.__file__).parent.glob("lib/*.so*"), key=lambda file: file.stat().st_size)
    with within("before"):
        before = read()
        with largest.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert len(mapped) > BLOCK and sum(mapped[place] for place in range(0, len(mapped), 4096))
            during = read()
    assert during.host - before.host < 0.6 * BLOCK and during.host_peak - before.host < 0.6 * BLOCK


def test_each_phase_has_its_greatest_peak_and_the_one_around_it_goes_on() -> None:
    with within("outer"):
        with within("inner"), allocated():
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


def test_the_worst_rank_has_the_highest_peak_of_the_accelerator_or_else_of_the_host() -> None:
    assert in_gib(RANKS) == {"host": [1, 1], "host_peak": [2, 3]} and worst(RANKS) == (1, 3 * GIB)
    assert in_gib(GPUS)["peak"] == [5, 4] and worst(GPUS) == (0, 5 * GIB)


def lines(output: Path) -> list[dict]:
    return [json.loads(line)["memory_gib"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_step_has_each_rank_s_memory_and_peak(finished: Path) -> None:
    for memory in lines(finished):
        now, most = (memory["train"][kind] for kind in ("host", "host_peak"))
        assert len(now) == len(most) == 2 and all(0.1 < a <= b for a, b in zip(now, most, strict=True))


def test_a_teacher_that_fills_the_cache_belongs_to_the_phase_prepare(
    tmp_path: Path, wan1: Path, one_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice when memory runs out there must not mention a student that is not there yet."""
    monkeypatch.setattr("wandistiller.training.prepare.build_teacher", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        prepare(read_job(RunConfig(**recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"))), 1))
    assert current.phase == "prepare"


def test_other_phases_are_in_the_next_step_s_line_and_all_peaks_in_memory_json(finished: Path) -> None:
    first, second, third, fourth = (set(memory) for memory in lines(finished))
    assert first == {"start", "prepare", "load", "train"} and second == fourth == {"train"}
    assert third >= {"train", "checkpoint", "draw"}
    memory = json.loads((finished / "memory.json").read_text())
    assert memory.keys() >= {"prepare", "load", "train", "checkpoint", "draw", "export"}
    ranks = {phase: len(kinds["host_peak"]) for phase, kinds in memory.items()}
    assert ranks == dict.fromkeys(memory, 2) | {"export": 1}  # which rank 0 does alone
