"""Every shipped teacher JSON gives diffusers' own velocities and hidden states, on one rank and on two."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from on_ranks.placements import differences
from ranks import ROOT, TEACHERS, call, environment, has_async_io

from wandistiller.engine.ds_config import key_problems, load
from wandistiller.teacher.placements.device_map import expand_device_map
from wandistiller.teacher.strategies import teacher_jsons

Results = dict[str, float]


def tasks(*names: str) -> list[str]:
    """In every precision, with one pass for both branches of guidance, and with two."""
    return [f"{n} {p} {passes}" for n in names for p in ("float32", "bfloat16") for passes in (1, 2)]


def on_ranks(ranks: int, folder: Path, work: Path, *tasks: str) -> Results:
    found = call(differences, folder, work, tasks, ranks=ranks)
    return {key: max(of_rank[key] for of_rank in found) for key in found[0]}


USUAL = [
    "replicated bfloat16 2",
    "sharded bfloat16 1",
    "zero_inference_cpu bfloat16 1",
    "streamed bfloat16 1",
    "host_cpu bfloat16 1",
    "files bfloat16 1",
    "owner float32 1",
    "device_map_sequential bfloat16 1",
]


def test_guided_velocities_and_hidden_states_of_eight_placements_are_bitwise_diffusers(
    wan2: Path, tmp_path: Path
) -> None:
    """The greatest difference over two ranks, both experts, with uneven batches."""
    found = on_ranks(2, wan2, tmp_path, *USUAL)
    assert {task: found[task] for task in USUAL} == dict.fromkeys(USUAL, 0)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_placement_s_guided_velocities_and_hidden_states_are_bitwise_diffusers(
    ranks: int, wan2: Path, tmp_path: Path
) -> None:
    wanted = tasks(*(n for n in TEACHERS if n != "zero_inference_nvme" or has_async_io()))
    found = on_ranks(ranks, wan2, tmp_path, *wanted)
    assert {task: found[task] for task in wanted} == dict.fromkeys(wanted, 0)


@pytest.fixture(scope="module")
def swapped(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    if not has_async_io():
        pytest.skip("no libaio here")
    work = tmp_path_factory.mktemp("work")
    left = work / "swap" / "wandistiller_of_a_killed_run"
    left.mkdir(parents=True)
    (left / "in_use").touch()
    return on_ranks(2, wide, work, *tasks("zero_inference_nvme")), work


@pytest.mark.slow
def test_weights_that_were_on_disk_give_bitwise_diffusers_outputs(swapped: tuple[Results, Path]) -> None:
    found, _ = swapped
    assert found["bytes on disk"] >= 2 * 10 * 1024**2 * 2  # two experts of ten 1024 x 1024 matrices in bf16
    assert {task: found[task] for task in tasks("zero_inference_nvme")} == dict.fromkeys(
        tasks("zero_inference_nvme"), 0
    )


@pytest.mark.slow
def test_swap_folders_are_gone_after_the_run_and_those_of_killed_runs_too(
    swapped: tuple[Results, Path],
) -> None:
    assert list((swapped[1] / "swap").iterdir()) == []


@pytest.mark.slow
def test_a_swap_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from wandistiller.engine.nvme import own_folder; "
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


@pytest.mark.parametrize("name", teacher_jsons())
def test_a_shipped_json_is_deepspeed_s_apart_from_one_block(name: str) -> None:
    assert key_problems(load(f"ds_configs/teacher/{name}.json").without("wandistiller")) == []


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
