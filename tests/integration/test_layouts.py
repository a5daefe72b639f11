"""A checkpoint goes on under any other ZeRO stage, offload and number of ranks; under its own bit for bit."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from layouts_on_ranks import CUT
from ranks import ROOT, program, runs_here
from ranks import STUDENTS as NAMES

HERE = [*filter(runs_here, NAMES)]
BETWEEN = "zero2_offload float32"
"""The layout that all others are changed to and from."""
TOLERANCE = 1e-5


def on_ranks(ranks: int, folder: Path, wan: Path, tasks: list[str]) -> dict[str, Any]:
    results = folder / f"{ranks}_{len(tasks)}.json"
    program(ROOT / "tests" / "helpers" / "layouts_on_ranks.py", folder, wan, results, *tasks, ranks=ranks)
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def own(folder: Path) -> Path:
    (folder / "few").mkdir()
    return folder / "few"


@pytest.fixture(scope="module")
def few(own: Path, wan2: Path) -> dict[str, Any]:
    """The results of two ranks for two engines: each whole, resumed, and gone over into the other."""
    names = BETWEEN, "zero3_offload float32"
    return on_ranks(2, own, wan2, [*names, *(f"{start}>{end}" for start in names for end in names)])


@pytest.mark.parametrize("name", [BETWEEN, "zero3_offload float32"])
def test_a_resumed_run_is_bitwise_equal(name: str, few: dict[str, Any]) -> None:
    assert few[f"{name}>{name}"] == few[name] | {"losses": few[name]["losses"][CUT:]}


def test_the_curve_goes_on_under_the_other_stage_and_with_one_rank(
    few: dict[str, Any], own: Path, wan2: Path
) -> None:
    wanted = pytest.approx(few[BETWEEN]["losses"][CUT:], rel=TOLERANCE)
    assert few[f"{BETWEEN}>zero3_offload float32"]["losses"] == wanted
    assert few[f"zero3_offload float32>{BETWEEN}"]["losses"] == wanted
    (alone,) = on_ranks(1, own, wan2, [f"zero3_offload float32@zero3_offload_float32_2>{BETWEEN}"]).values()
    assert alone["losses"] == wanted


# The same of every student JSON, in both precisions, and on four ranks


@pytest.fixture(scope="module")
def two(folder: Path, wan2: Path) -> dict[str, Any]:
    """Results of two ranks: whole runs, their continuations, and continuations under another layout."""
    engines = [f"{name} {precision}" for name in HERE for precision in ("float32", "bf16")]
    tasks = [task for e in engines for task in (e, f"{e}>{e}")]
    others = [f"{name} float32" for name in HERE if f"{name} float32" != BETWEEN]
    return on_ranks(
        2, folder, wan2, tasks + [task for e in others for task in (f"{BETWEEN}>{e}", f"{e}>{BETWEEN}")]
    )


@pytest.fixture(scope="module")
def one(two: dict[str, Any], folder: Path, wan2: Path) -> dict[str, Any]:
    """What one rank makes of the checkpoints of two; and one of its own."""
    kept = {name: f"{name}_float32_2" for name in HERE}
    return on_ranks(
        1, folder, wan2, [BETWEEN, *(f"{name} float32@{kept[name]}>{name} float32" for name in HERE)]
    )


@pytest.fixture(scope="module")
def four(one: dict[str, Any], folder: Path, wan2: Path) -> dict[str, Any]:
    """What four small ranks make of the checkpoints of two and of one."""
    sources = [
        f"zero3_offload float32@zero3_offload_float32_2>{e}" for e in ("zero3_offload float32", BETWEEN)
    ]
    return on_ranks(4, folder, wan2, [*sources, f"{BETWEEN}@{BETWEEN.replace(' ', '_')}_1>{BETWEEN}"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_of_every_student_json_is_bitwise_equal(
    name: str, precision: str, two: dict[str, Any]
) -> None:
    if name not in HERE:
        pytest.skip("no libaio here")
    whole, resumed = two[f"{name} {precision}"], two[f"{name} {precision}>{name} {precision}"]
    assert resumed == whole | {"losses": whole["losses"][CUT:]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["from", "to"])
@pytest.mark.parametrize("name", [n for n in NAMES if f"{n} float32" != BETWEEN])
def test_the_curve_goes_on_under_another_stage_or_offload(name: str, way: str, two: dict[str, Any]) -> None:
    if name not in HERE:
        pytest.skip("no libaio here")
    task = f"{BETWEEN}>{name} float32" if way == "to" else f"{name} float32>{BETWEEN}"
    assert two[task]["losses"] == pytest.approx(two[BETWEEN]["losses"][CUT:], rel=TOLERANCE)


@pytest.mark.slow
def test_the_curve_goes_on_with_one_rank_instead_of_two(one: dict[str, Any], two: dict[str, Any]) -> None:
    tasks = {task: found["losses"] for task, found in one.items() if ">" in task}
    assert len(tasks) == len(HERE)
    for task, losses in tasks.items():
        assert losses == pytest.approx(two[BETWEEN]["losses"][CUT:], rel=TOLERANCE), shlex.quote(task)


@pytest.mark.slow
def test_the_curve_goes_on_with_four_ranks_instead_of_two_or_one(
    four: dict[str, Any], two: dict[str, Any]
) -> None:
    assert len(four) == 3
    for found in four.values():
        assert found["losses"] == pytest.approx(two[BETWEEN]["losses"][CUT:], rel=TOLERANCE)
