"""Free memory of machines, and the demands of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import program

from wandistiller.distributed import collectives
from wandistiller.engine.nvme import lock_problems, locked_bytes
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.machine import Machine, demands, this_machine
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB, disk_free, host_free

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
    return {
        "memory.max": limit,
        "memory.current": used,
        "memory.stat": f"anon {used}\nfile 9\nshmem 7\nactive_file {active}\ninactive_file {inactive}",
    }


def v1(limit: int, used: int, cache: int) -> dict[str, Any]:
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"active_file 1\ninactive_file 1\ntotal_active_file 0\ntotal_inactive_file {cache}",
    }


def test_high_is_a_limit_too_beyond_which_the_kernel_takes_memory_back(tmp_path: Path) -> None:
    held = v2(20 * GIB, 5 * GIB) | {"memory.high": 12 * GIB}
    assert host_free(system(tmp_path, "0::/user\n", user=held)) == 7 * GIB


LIMIT, NEED = 8 * 2**20, 100 * 2**20


@pytest.mark.parametrize(
    ("limit", "need", "capabilities", "refused"),
    [
        (LIMIT, NEED, "0", True),
        (LIMIT, LIMIT, "0", False),
        (-1, NEED, "0", False),
        (LIMIT, NEED, "0000000000004000", False),
    ],
)
def test_buffers_of_nvme_that_may_not_stay_in_memory_are_refused(
    tmp_path: Path, limit: int, need: int, capabilities: str, refused: bool
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name: python\nCapEff:\t{capabilities}\n")
    found = lock_problems(need, limit, tmp_path)
    assert bool(found) == refused and all(
        "100 MiB a rank" in p and "may lock 8 MiB (`ulimit -l`)" in p for p in found
    )


def test_locked_are_the_buffers_of_weights_and_of_the_optimizer() -> None:
    ds = read_json("ds_configs/student/zero3_nvme.json")
    assert locked_bytes(ds, [1000, 10**9], 2, 2) == 2 * 8 * 5 * 10**8 + 4 * 4 * 10**8
    assert locked_bytes(read_json("ds_configs/student/zero3_offload.json"), [10**9], 2, 2) == 0


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
    assert (
        host_free(system(tmp_path, "4:memory:/job\n", memory__job=v1(9 * GIB, 8 * GIB, 2 * GIB))) == 3 * GIB
    )


def test_a_folder_that_is_not_there_yet_has_its_parent_s_disk(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "not" / "yet") == pytest.approx(disk_free(tmp_path), rel=0.01)


def test_this_machine_is_measured_without_other_ranks(tmp_path: Path) -> None:
    found = this_machine(tmp_path)
    assert (found.ranks, found.ranks_on_node) == (1, 1)
    assert (found.device_free is None) == (collectives.device().type == "cpu")
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
from wandistiller.distributed import collectives
from wandistiller.planner.machine import this_machine

collectives.init("warning")
found = this_machine(Path(sys.argv[1]))
(Path(sys.argv[1]) / f"{collectives.rank()}.json").write_text(json.dumps(dataclasses.asdict(found)))
collectives.destroy()
"""


def test_all_ranks_find_the_same_machine(on_two_ranks: list[Machine]) -> None:
    assert on_two_ranks[0] == on_two_ranks[1]


def test_ranks_of_one_machine_are_counted_as_such(on_two_ranks: list[Machine]) -> None:
    assert (on_two_ranks[0].ranks, on_two_ranks[0].ranks_on_node) == (2, 2)


# What a run would take of it


def test_ranks_of_a_node_share_its_memory_and_each_has_a_gpu() -> None:
    gpus = Machine(24 * GIB, 128 * GIB, 512 * GIB, 4, 2)
    device, host, disk = demands(
        Bytes(device=GIB, transient=2 * GIB, host=5 * GIB, node=7 * GIB, disk=GIB), gpus
    )
    assert (device.need, host.need, disk.need) == (3 * GIB, 17 * GIB, 2 * GIB)


def test_without_gpus_all_is_cpu_memory() -> None:
    host, _ = demands(
        Bytes(device=GIB, transient=2 * GIB, host=5 * GIB, node=7 * GIB), Machine(None, 64 * GIB, GIB, 2, 2)
    )
    assert host.need == 23 * GIB


@pytest.mark.parametrize(("free", "reserve"), [(100 * GIB, 10 * GIB), (10 * GIB, 2 * GIB), (4 * GIB, GIB)])
def test_a_tenth_of_cpu_memory_is_kept_but_at_least_2_gib_or_a_quarter(free: int, reserve: int) -> None:
    host, _ = demands(Bytes(host=GIB), Machine(None, free, GIB, 1, 1))
    assert host.reserve == reserve and host.over == GIB - (free - reserve)
