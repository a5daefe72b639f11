"""Every shipped teacher JSON gives the velocities and hidden states of diffusers' own modules, on one rank and on two."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, environment, has_async_io, program

from wandistiller import deepspeed_json
from wandistiller.config import SHIPPED, STRATEGIES, read_json
from wandistiller.placement import expand_device_map

NAMES = sorted(file.stem for file in (SHIPPED / "teacher").glob("*.json"))
PLACED = [name for name in NAMES if name != "auto"]  # auto is one of the others
PROGRAM = ROOT / "tests" / "placements_on_ranks.py"
Results = dict[str, float]


def runs_here(name: str) -> bool:
    return name != "zero_inference_nvme" or has_async_io()


def on_ranks(ranks: int, folder: Path, work: Path, *names: str) -> Results:
    program(PROGRAM, folder, work, *names, ranks=ranks)
    return json.loads((work / "results.json").read_text())


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def differences(request: pytest.FixtureRequest, wan2: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Greatest difference to diffusers over all ranks, both experts, guided, with uneven batches, by JSON and precision."""
    return on_ranks(request.param, wan2, tmp_path_factory.mktemp("work"), *(n for n in PLACED if runs_here(n)))


@pytest.mark.parametrize("passes", [1, 2], ids=["one pass", "two passes"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PLACED)
def test_a_placement_s_guided_velocities_and_hidden_states_are_bitwise_diffusers(
    differences: Results, name: str, precision: str, passes: int
) -> None:
    if not runs_here(name):
        pytest.skip("no libaio here")
    assert differences[f"{name} {precision} {passes}"] == 0


@pytest.fixture(scope="module")
def swapped(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    if not has_async_io():
        pytest.skip("no libaio here")
    work = tmp_path_factory.mktemp("work")
    left = work / "swap" / "wandistiller_of_a_killed_run"
    left.mkdir(parents=True)
    (left / "in_use").touch()
    return on_ranks(2, wide, work, "zero_inference_nvme"), work


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_that_were_on_disk_give_bitwise_diffusers_answers(swapped: tuple[Results, Path], precision: str) -> None:
    assert swapped[0][f"zero_inference_nvme {precision} 1"] == 0


def test_weights_were_on_disk(swapped: tuple[Results, Path]) -> None:
    assert swapped[0]["bytes on disk"] >= 2 * 10 * 1024**2 * 2  # two experts of ten 1024 x 1024 matrices in bf16


def test_swap_folders_are_gone_after_the_run_and_those_of_killed_runs_too(swapped: tuple[Results, Path]) -> None:
    assert list((swapped[1] / "swap").iterdir()) == []


def test_a_swap_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from wandistiller.swap import own_folder; "
    code += "print(own_folder(Path(sys.argv[1])), flush=True); time.sleep(float(sys.argv[2]))"

    def start(seconds: float) -> tuple[subprocess.Popen, Path]:
        words = [sys.executable, "-c", code, str(tmp_path), str(seconds)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
        return process, Path(process.stdout.readline().strip())

    first, folder = start(600)
    second, _ = start(0)
    assert second.wait() == 0 and folder.is_dir()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert folder.is_dir()
    third, _ = start(0)
    assert third.wait() == 0 and not folder.exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_json_is_deepspeed_s_apart_from_one_block(name: str) -> None:
    ds = read_json(f"ds_configs/teacher/{name}.json")
    assert deepspeed_json.key_problems(name, {k: v for k, v in ds.items() if k != "wandistiller"}) == []


def test_each_strategy_means_a_shipped_json_and_each_json_but_three_has_a_strategy() -> None:
    assert sorted(STRATEGIES.values()) == sorted({*NAMES} - {"device_map_balanced", "sharded_node", "zero_inference_cpu_node"})


MODULES = ["blocks.0", "blocks.1", "blocks.2", "patch_embedding", "proj_out"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"*": 0}, [0, 0, 0, 0, 0]),
        ({"blocks": 1, "*": 0}, [1, 1, 1, 0, 0]),
        ({"blocks.0-1": 0, "blocks.2-": "disk", "*": "cpu"}, [0, 0, "disk", "cpu", "cpu"]),
        ({"blocks.0": 0, "blocks.1-": 1, "patch_embedding": 2, "proj_out": 3}, [0, 1, 1, 2, 3]),
        ({"*": 0, "blocks.1-99": 1}, [0, 1, 1, 0, 0]),
    ],
)
def test_a_device_map_may_name_spans_and_the_rest(given: dict, expected: list) -> None:
    assert [expand_device_map(given, MODULES)[m] for m in MODULES] == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"block.0": 0, "*": 1}, "This teacher has no `block.0`. It has blocks.0-2, patch_embedding, proj_out; * is the rest."),
        ({"blocks": 0, "proj_out": 0}, "`patch_embedding` has no device. Add it, or `*` for the rest."),
    ],
)
def test_a_device_map_that_does_not_fit_says_what_there_is(given: dict, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand_device_map(given, MODULES)
    assert str(caught.value) == said
