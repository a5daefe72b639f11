"""What machines have free, and which placement of the teacher fits into it."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import program

from wandistiller import distributed
from wandistiller.config import read_json
from wandistiller.deepspeed_json import student_engine
from wandistiller.machine import GIB, Choice, Machine, candidates, choose, disk_free, host_free, placed, this_machine
from wandistiller.memory import Bytes, student_bytes, teacher_bytes
from wandistiller.problems import ConfigError
from wandistiller.student_json import fill_steps
from wandistiller.wan import WanFolder, open_wan

SMALL, LARGE, FIVE, TWO = "1.3B", "14B", "5B", "A14B"

# The machine

MEMINFO = "MemTotal:  65536000 kB\nMemFree:  1000 kB\nMemAvailable:  41943040 kB\n"  # 40 GiB


def system(root: Path, cgroup: str, **groups: dict[str, Any]) -> Path:
    """proc/ and sys/ with these files of control groups; a key's __ stands for /."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, files in groups.items():
        folder = root / "sys/fs/cgroup" / name.replace("__", "/").strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(f"{content}\n")
    return root


def v2(limit: Any, used: int, active: int = 0, inactive: int = 0) -> dict[str, Any]:
    return {"memory.max": limit, "memory.current": used,
            "memory.stat": f"anon {used}\nfile 9\nshmem 7\nactive_file {active}\ninactive_file {inactive}"}  # fmt: skip


def v1(limit: int, used: int, cache: int) -> dict[str, Any]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used,
            "memory.stat": f"active_file 1\ninactive_file 1\ntotal_active_file 0\ntotal_inactive_file {cache}"}  # fmt: skip


def test_without_a_limit_the_system_s_available_memory_is_free(tmp_path: Path) -> None:
    assert host_free(system(tmp_path, "0::/user\n", user=v2("max", 5))) == 40 * GIB


def test_a_control_group_s_limit_less_its_use_is_free(tmp_path: Path) -> None:
    assert host_free(system(tmp_path, "0::/job\n", job=v2(16 * GIB, 6 * GIB))) == 10 * GIB


def test_file_cache_in_use_counts_as_free(tmp_path: Path) -> None:
    assert host_free(system(tmp_path, "0::/job\n", job=v2(16 * GIB, 14 * GIB, GIB, 3 * GIB))) == 6 * GIB


def test_the_least_of_nested_groups_counts(tmp_path: Path) -> None:
    groups = {"slice": v2(20 * GIB, 15 * GIB), "slice__job": v2(16 * GIB, 2 * GIB)}
    assert host_free(system(tmp_path, "0::/slice/job\n", **groups)) == 5 * GIB


def test_a_limit_above_the_machine_s_memory_frees_nothing(tmp_path: Path) -> None:
    assert host_free(system(tmp_path, "0::/job\n", job=v2(500 * GIB, 0))) == 40 * GIB


def test_a_group_over_its_limit_has_nothing_free(tmp_path: Path) -> None:
    assert host_free(system(tmp_path, "0::/job\n", job=v2(GIB, 2 * GIB))) == 0


def test_a_version_1_container_that_sees_its_own_group_at_the_top_is_read(tmp_path: Path) -> None:
    lines = "9:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/docker/a\n"
    assert host_free(system(tmp_path, lines, memory=v1(8 * GIB, 6 * GIB, GIB))) == 3 * GIB


def test_version_1_s_cache_is_that_of_the_whole_group(tmp_path: Path) -> None:
    assert host_free(system(tmp_path, "4:memory:/job\n", memory__job=v1(9 * GIB, 8 * GIB, 2 * GIB))) == 3 * GIB


def test_a_folder_that_is_not_there_yet_has_its_parent_s_disk(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "not" / "yet") == pytest.approx(disk_free(tmp_path), rel=0.01)


def test_this_machine_is_measured_without_other_ranks(tmp_path: Path) -> None:
    found = this_machine(tmp_path)
    assert (found.ranks, found.ranks_on_node) == (1, 1)
    assert (found.device_free is None) == (distributed.device().type == "cpu")
    assert 0 < found.host_free < 2**50 and found.disk_free > 0


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Machine]:
    """What two ranks of this machine measure."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "program.py").write_text(PROGRAM)
    program(folder / "program.py", folder, ranks=2)
    return [Machine(**json.loads((folder / f"{rank}.json").read_text())) for rank in range(2)]


PROGRAM = """import dataclasses, json, sys
from pathlib import Path
from wandistiller import distributed, machine

distributed.init("warning")
found = machine.this_machine(Path(sys.argv[1]))
(Path(sys.argv[1]) / f"{distributed.rank()}.json").write_text(json.dumps(dataclasses.asdict(found)))
distributed.finish()
"""


def test_all_ranks_find_the_same_machine(on_two_ranks: list[Machine]) -> None:
    assert on_two_ranks[0] == on_two_ranks[1]


def test_ranks_of_one_machine_are_counted_as_such(on_two_ranks: list[Machine]) -> None:
    assert (on_two_ranks[0].ranks, on_two_ranks[0].ranks_on_node) == (2, 2)


# The choice

STUDENT = Bytes(device=5 * GIB, host=20 * GIB)


def gpus(count: int, each: int, host: int, disk: int = 512, nodes: int = 1) -> Machine:
    return Machine(each * GIB, host * GIB, disk * GIB, count, count // nodes)


def cpus(host: int, ranks: int = 1, disk: int = 512, nodes: int = 1) -> Machine:
    return Machine(None, host * GIB, disk * GIB, ranks, ranks // nodes)


def chosen(folder: WanFolder, machine: Machine, taken: Bytes = STUDENT, dtype: str = "bfloat16") -> Choice:
    return choose(folder, taken, machine, dtype)


@pytest.mark.parametrize(
    ("name", "machine", "placement"),
    [
        (SMALL, gpus(1, 24, 64), "replicated"), (FIVE, gpus(1, 24, 64), "replicated"),
        (LARGE, gpus(1, 24, 64), "zero_inference_cpu"),  # 26.7 GiB
        (TWO, gpus(1, 24, 64), "zero_inference_nvme"),  # 53.3 GiB and the student's 20 are over 64
        (LARGE, gpus(2, 48, 128), "replicated"), (TWO, gpus(2, 48, 128), "sharded"),
        (LARGE, gpus(2, 24, 128), "sharded"), (TWO, gpus(2, 24, 128), "zero_inference_cpu"),
        (TWO, gpus(4, 80, 400), "replicated"), (TWO, gpus(8, 80, 1000), "replicated"), (TWO, gpus(8, 24, 400), "sharded"),
        (TWO, gpus(4, 16, 96, nodes=2), "zero_inference_cpu"),  # half of it a node
    ],
)  # fmt: skip
def test_on_gpus_the_fastest_that_fits_is(wans: dict[str, WanFolder], name: str, machine: Machine, placement: str) -> None:
    assert chosen(wans[name], machine).name == placement


def test_cpus_compute_for_gpus_that_the_student_fills(wans: dict[str, WanFolder]) -> None:
    full = Bytes(device=int(20.3 * GIB), host=20 * GIB)  # of 20.4
    assert chosen(wans[LARGE], gpus(1, 24, 64), full).name == "host_cpu"


@pytest.mark.parametrize(
    ("name", "machine", "placement"),
    [
        (SMALL, cpus(16), "replicated"), (FIVE, cpus(16), "replicated"),
        (LARGE, cpus(16), "zero_inference_nvme"), (TWO, cpus(16), "zero_inference_nvme"),
        (LARGE, cpus(64), "replicated"), (TWO, cpus(64), "zero_inference_nvme"), (TWO, cpus(256), "replicated"),
        (LARGE, cpus(64, ranks=2), "host_cpu"), (TWO, cpus(256, ranks=4), "host_cpu"),
        (TWO, cpus(64, ranks=2, nodes=2), "sharded"),  # half of it a node
    ],
)  # fmt: skip
def test_on_cpus_the_fastest_that_fits_is(wans: dict[str, WanFolder], name: str, machine: Machine, placement: str) -> None:
    assert chosen(wans[name], machine, Bytes(device=2 * GIB)).name == placement


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_embedded_teacher_is_replicated_on_a_laptop_with_3_gib_left(ranks: int) -> None:
    tiny = open_wan("tiny")
    ds, _ = student_engine("s.json", fill_steps(read_json("ds_configs/student/quickstart.json"), 700), ranks)
    taken = student_bytes(tiny.config | {"num_layers": 6}, 1, ds, ranks, accelerator=False)
    assert chosen(tiny, cpus(3, ranks=ranks), taken).name == "replicated"


def test_float32_may_need_another_placement_than_bf16(wans: dict[str, WanFolder]) -> None:
    names = [chosen(wans[LARGE], gpus(2, 48, 128), dtype=dtype).name for dtype in ("bfloat16", "float32")]
    assert names == ["replicated", "sharded"]


@pytest.mark.parametrize("machine", [gpus(1, 24, 64), cpus(64)])
def test_one_rank_is_offered_nothing_that_only_several_gain_from(machine: Machine) -> None:
    assert "sharded" not in candidates(machine)


def test_a_gpu_keeps_15_percent_for_activations(wans: dict[str, WanFolder]) -> None:
    teacher = teacher_bytes(wans[TWO], placed("replicated", "bfloat16"), 1)
    needed = (teacher.device + STUDENT.device) / 0.85
    names = [chosen(wans[TWO], Machine(int(needed) + extra, 2**40, 2**40, 1, 1)).name for extra in (2, -2)]
    assert names == ["replicated", "zero_inference_cpu"]


def test_a_choice_says_why_with_numbers(wans: dict[str, WanFolder]) -> None:
    assert chosen(wans[TWO], gpus(2, 24, 128)).why == (
        "zero_inference_cpu: the teacher's 53.3 GiB and the student need 5.6 GiB on each GPU and 93.3 GiB of CPU memory, "
        "free are 24.0 GiB on each GPU (3.6 of them kept in reserve) and 128.0 GiB of CPU memory (12.8 of them kept in "
        "reserve); replicated would need 58.3 GiB on each GPU; sharded would need 32.3 GiB on each GPU"
    )


def refused(folder: WanFolder, machine: Machine, taken: Bytes = STUDENT, dtype: str = "bfloat16") -> str:
    with pytest.raises(ConfigError) as caught:
        chosen(folder, machine, taken, dtype)
    (said,) = caught.value.problems
    return said


def test_where_nothing_fits_the_message_has_what_is_needed_and_what_is_free(wans: dict[str, WanFolder]) -> None:
    said = refused(wans[TWO], gpus(1, 24, 64, disk=32))
    for part in ("53.3 GiB in bfloat16", "24.0 GiB on each GPU (3.6 of them", "64.0 GiB of CPU memory (6.4 of them",
                 "32.0 GiB of disk (3.2 of them", "replicated would need 58.3 GiB on each GPU",
                 "zero_inference_cpu would need 73.3 GiB of CPU memory", "zero_inference_nvme would need 53.1 GiB of disk",
                 "a larger disk for the swap folder"):  # fmt: skip
        assert part in said


def test_where_the_student_alone_does_not_fit_the_message_says_so(wans: dict[str, WanFolder]) -> None:
    said = refused(wans[SMALL], gpus(2, 24, 64), Bytes(device=30 * GIB))
    assert "The student alone needs 30.0 GiB on each GPU" in said and "zero3_offload.json" in said


def test_where_a_float32_teacher_does_not_fit_bf16_is_advised(wans: dict[str, WanFolder]) -> None:
    assert "a teacher in bfloat16, which takes half" in refused(wans[LARGE], gpus(1, 24, 64, disk=32), dtype="float32")
