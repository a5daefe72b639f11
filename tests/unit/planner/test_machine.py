"""Free memory of machines, and what a run needs of it."""

import resource
from pathlib import Path
from typing import Any

import pytest
from ranks import program

from wandistiller.engine.engine_config import EngineConfig
from wandistiller.engine.nvme import lock_problems, locked_bytes
from wandistiller.engine.zero_memory import Bytes
from wandistiller.planner.machine import Machine, demands
from wandistiller.utils.files import read_json
from wandistiller.utils.system_memory import GIB, host_free

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
    tmp_path: Path, limit: int, need: int, capabilities: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name: python\nCapEff:\t{capabilities}\n")
    problems = lock_problems(need, tmp_path)
    assert len(problems) == refused
    assert all("100 MiB a rank" in p and "may lock 8 MiB (`ulimit -l`)" in p for p in problems)


def test_locked_are_the_buffers_of_weights_and_of_the_optimizer() -> None:
    on_nvme, on_cpu = (
        EngineConfig(file, read_json(file))
        for file in ("ds_configs/student/zero3_nvme.json", "ds_configs/student/zero3_offload.json")
    )
    assert locked_bytes(on_nvme, [1000, 10**9], 2) == 2 * 8 * 5 * 10**8 + 4 * 4 * 10**8
    assert locked_bytes(on_cpu, [10**9], 2) == 0


NESTED = {"slice": v2(20 * GIB, 15 * GIB), "slice__job": v2(16 * GIB, 2 * GIB)}
TOP = "9:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n0::/docker/a\n"
FREE = {
    "without a limit, the system's available memory": ("0::/job\n", {"job": v2("max", 5)}, 40),
    "a control group's limit less its use": ("0::/job\n", {"job": v2(16 * GIB, 6 * GIB)}, 10),
    "also file cache in use": ("0::/job\n", {"job": v2(16 * GIB, 14 * GIB, GIB, 3 * GIB)}, 6),
    "the least of nested groups": ("0::/slice/job\n", NESTED, 5),
    "up to `high`, beyond which the kernel takes memory back": (
        "0::/job\n",
        {"job": v2(20 * GIB, 5 * GIB) | {"memory.high": 12 * GIB}},
        7,
    ),
    "in version 1, in a container that sees its own group at the top": (
        TOP,
        {"memory": v1(8 * GIB, 6 * GIB, GIB)},
        3,
    ),
    "in version 1, also the cache of the whole group": (
        "4:memory:/job\n",
        {"memory__job": v1(9 * GIB, 8 * GIB, 2 * GIB)},
        3,
    ),
}
"""Free memory -> proc/self/cgroup, files of control groups, and GiB."""


@pytest.mark.parametrize(("cgroup", "groups", "free"), FREE.values(), ids=FREE)
def test_free_cpu_memory_is(tmp_path: Path, cgroup: str, groups: dict[str, Any], free: int) -> None:
    assert host_free(system(tmp_path, cgroup, **groups)) == free * GIB


PROGRAM = """import dataclasses, json, sys
from pathlib import Path
from wandistiller.distributed import collectives
from wandistiller.planner.machine import this_machine

collectives.init("warning")
machine = this_machine(Path(sys.argv[1]))
(Path(sys.argv[1]) / f"{collectives.rank()}.json").write_text(json.dumps(dataclasses.asdict(machine)))
collectives.destroy()
"""


def test_two_ranks_of_one_machine_measure_the_same_and_count_each_other(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program(tmp_path / "program.py", tmp_path, ranks=2)
    first, second = (Machine(**read_json(tmp_path / f"{rank}.json")) for rank in range(2))
    assert first == second and (first.ranks, first.ranks_on_node) == (2, 2)


def test_ranks_of_a_node_share_its_memory_and_each_has_a_gpu() -> None:
    gpus = Machine(24 * GIB, 128 * GIB, 512 * GIB, 4, 2)
    rank = Bytes(device=GIB, transient=2 * GIB, host=5 * GIB, node=7 * GIB, disk=GIB)
    device, host, disk = demands([rank], gpus)
    assert (device.need, host.need, disk.need) == (3 * GIB, 17 * GIB, 2 * GIB)


@pytest.mark.parametrize(("free", "reserve"), [(100 * GIB, 10 * GIB), (10 * GIB, 2 * GIB), (4 * GIB, GIB)])
def test_a_tenth_of_cpu_memory_is_kept_but_at_least_2_gib_or_a_quarter(free: int, reserve: int) -> None:
    host, _ = demands([Bytes(host=GIB)], Machine(None, free, GIB, 1, 1))
    assert host.reserve == reserve and host.over == GIB - (free - reserve)
