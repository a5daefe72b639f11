"""A checkpoint goes on under any other ZeRO stage, offload and number of ranks; under its own bit for bit."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from on_ranks.runs import CUT, resumed_runs
from ranks import STUDENTS, call, runs_here
from slow_cases import slow_but

BETWEEN, OTHER = "zero2_offload float32", "zero3_offload float32"
"""The engine that all others are changed to and from, and the one that is changed by default."""
OTHERS = [name for name in STUDENTS if f"{name} float32" != BETWEEN]
TOLERANCE = 1e-5
Results = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Results:
    """A function that gives the results of tasks of `resumed_runs`, each run once."""
    folder, done = tmp_path_factory.mktemp("layouts"), {}

    def results(ranks: int, *tasks: str) -> dict[str, Any]:
        new = [task for task in tasks if (ranks, task) not in done]
        if new:
            (found, *_) = call(resumed_runs, folder, wan2, new, ranks=ranks)
            done.update({(ranks, task): found[task] for task in new})
        return {task: done[ranks, task] for task in tasks}

    return results


def on_two_ranks(name: str, precision: str, on_ranks: Results, *others: str) -> dict[str, Any]:
    """The runs of BETWEEN and of an engine on two ranks, of this one also resumed, and other tasks."""
    if not runs_here(name):
        pytest.skip("no libaio here")
    engine = f"{name} {precision}"
    return on_ranks(2, *dict.fromkeys([BETWEEN, engine, f"{engine}>{engine}", *others]))


def rest(found: dict[str, Any]) -> Any:
    """The losses of the run of BETWEEN after the cut, to a tolerance."""
    return pytest.approx(found[BETWEEN]["losses"][CUT:], rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "precision"), slow_but([tuple(OTHER.split())], product(STUDENTS, ["float32", "bf16"]))
)
def test_a_resumed_run_is_bitwise_equal(name: str, precision: str, on_ranks: Results) -> None:
    found, engine = on_two_ranks(name, precision, on_ranks), f"{name} {precision}"
    whole = found[engine]
    assert found[f"{engine}>{engine}"] == whole | {"losses": whole["losses"][CUT:]}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_curve_goes_on_under_another_stage_or_offload(name: str, on_ranks: Results) -> None:
    tasks = f"{BETWEEN}>{name} float32", f"{name} float32>{BETWEEN}"
    found = on_two_ranks(name, "float32", on_ranks, *tasks)
    for task in tasks:
        assert found[task]["losses"] == rest(found), task


def test_the_curve_goes_on_with_one_rank_under_another_stage(on_ranks: Results) -> None:
    found = on_two_ranks(*OTHER.split(), on_ranks)
    (alone,) = on_ranks(1, f"@zero3_offload_float32_2>{BETWEEN}").values()
    assert alone["losses"] == rest(found)


@pytest.mark.slow
def test_the_curve_goes_on_with_four_ranks_instead_of_two_or_one(on_ranks: Results) -> None:
    found = on_two_ranks(*OTHER.split(), on_ranks)
    on_ranks(1, BETWEEN)
    sources = [f"@zero3_offload_float32_2>{OTHER}", f"@zero3_offload_float32_2>{BETWEEN}"]
    for four in on_ranks(4, *sources, f"@zero2_offload_float32_1>{BETWEEN}").values():
        assert four["losses"] == rest(found)
