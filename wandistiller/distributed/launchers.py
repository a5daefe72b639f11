"""Rank variables of srun and Open MPI's mpirun, translated into those that torchrun and deepspeed set."""

import os
import re
import sys
import zlib
from collections.abc import MutableMapping
from pathlib import Path

from wandistiller.utils.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LAUNCHERS = {  # their names for these four; the outer launcher last: mpirun uses srun to reach its nodes
    "Open MPI's mpirun": [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "srun": ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"],
}
MARKS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}  # both set RANK themselves
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MPI_LOCALNRANKS", *(n[3] for n in LAUNCHERS.values()))
PORTS = range(20000, 30000)  # below those that Linux hands out: ip-sysctl.rst, ip_local_port_range


def set_rank_variables(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in processes started by srun or mpirun.

    Raises:
        ConfigError: ranks on several nodes, and the launcher does not say which node is the first.
    """
    if "RANK" in env or not (launcher := next(iter(_present(env)), None)):
        return
    env |= {
        name: _first_number(env[theirs]) for name, theirs in zip(TORCHRUN, LAUNCHERS[launcher], strict=True)
    }
    run = env.get("PMIX_NAMESPACE", f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}")
    # two runs on a node have two ports
    env.setdefault("MASTER_PORT", str(PORTS[zlib.crc32(run.encode()) % len(PORTS)]))
    nodes = env.get("SLURM_STEP_NODELIST", "") if launcher == "srun" else ""
    one_node = env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"]
    if not env.setdefault("MASTER_ADDR", "127.0.0.1" if one_node else first_host(nodes)):
        raise ConfigError(
            f"{launcher}: {env['WORLD_SIZE']} ranks on several nodes, and MASTER_ADDR is not set. Set it "
            "on all of them to the first node's name or address: `mpirun -x MASTER_ADDR=HOST`."
        )


def _first_number(count: str) -> str:
    return re.match(r"\d+", count)[0]  # Slurm writes `4(x2),3` for three nodes


def _present(env: MutableMapping[str, str]) -> list[str]:
    return [launcher for launcher, names in LAUNCHERS.items() if env.keys() >= {*names}]


def started_by(env: MutableMapping[str, str]) -> str:
    """Name the program that started this process; the innermost, where one started another."""
    inner = [launcher for launcher, name in MARKS.items() if name in env]
    return [*inner, *_present(env), "none" if env.get("WORLD_SIZE", "1") == "1" else "another"][0]


def share_cores(env: MutableMapping[str, str], cores: int) -> None:
    """Set OMP_NUM_THREADS, if unset, to this rank's share of the node's cores; before torch is imported."""
    ranks = next((int(_first_number(env[name])) for name in LOCAL_SIZES if name in env), 1)
    if ranks > 1:
        env.setdefault("OMP_NUM_THREADS", env.get("SLURM_CPUS_PER_TASK", str(max(1, cores // ranks))))


def own_programs_first(env: MutableMapping[str, str]) -> None:
    """Put this Python's programs, such as ninja, first on PATH: launchers by ssh activate no environment."""
    own, path = str(Path(sys.executable).parent), env.get("PATH", os.defpath)
    if own not in path.split(os.pathsep):
        env["PATH"] = own + os.pathsep + path


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: gpu07 of `gpu[07-09,12],login`. Source: scontrol(1)."""
    first = re.match(r"(?:\[[^\]]*\]|[^,])*", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
