"""Which rank this process is, whoever started it: what srun and mpirun say, in the words of torchrun and deepspeed's launcher."""

import os
import re
import sys
import zlib
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

from wandistiller.problems import ConfigError


class Names(NamedTuple):
    """The variables in which a launcher tells a process its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    """How many there are on this node; Slurm says it of all nodes: `4(x2)` is 4 on each of two, the first of them first."""
    nodes: str
    """A list of the nodes, or nothing."""
    run: str
    """What is the same in all processes of this run, and in no other run on the machine."""


LAUNCHERS = {
    "Open MPI's mpirun": Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                               "OMPI_COMM_WORLD_LOCAL_SIZE", "", "PMIX_NAMESPACE"),
    "MPICH's or Intel's mpirun": Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""),
    "srun": Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST",
                  "SLURM_JOB_ID"),
}  # fmt: skip
"""The outer one last: mpirun uses srun to reach its nodes."""
MARKS = {"torchrun": "TORCHELASTIC_RUN_ID", "deepspeed": "CROSS_RANK"}
"""Variables that only those launchers set that say RANK themselves."""
PORTS = range(20000, 30000)
"""Below those that a system gives out by itself. Source: Linux, Documentation/networking/ip-sysctl.rst, ip_local_port_range."""


def adopt(env: MutableMapping[str, str]) -> None:
    """Add RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT to the variables of a process that srun or mpirun started.

    Raises:
        ConfigError: the first node cannot be known.
    """
    if "RANK" in env:
        return
    started = [(launcher, n) for launcher, n in LAUNCHERS.items() if {n.rank, n.size, n.local_rank} <= env.keys()]
    for launcher, names in started[:1]:
        env |= {"RANK": env[names.rank], "WORLD_SIZE": env[names.size], "LOCAL_RANK": env[names.local_rank]}
        env |= {"LOCAL_WORLD_SIZE": str(_first_number(env[names.local_size]))} if names.local_size in env else {}
        env.setdefault("MASTER_PORT", str(_port(env, names)))
        if not env.setdefault("MASTER_ADDR", _first_node(env, names)):
            raise ConfigError(f"{launcher}: started {env[names.size]} ranks on several nodes, and does not say which is the "
                              "first. Set MASTER_ADDR to its name or address on all of them, with `mpirun -x MASTER_ADDR=HOST` "
                              "(Open MPI) or `mpirun -genv MASTER_ADDR HOST` (MPICH, Intel).")


def share_cores(env: MutableMapping[str, str], cores: int) -> None:
    """Let each rank of a node have its share of the cores, where nobody says how many; torch reads it when it is imported."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *(n.local_size for n in LAUNCHERS.values()))  # torchrun's, deepspeed's
    ranks = next((_first_number(env[name]) for name in names if name in env), 1)
    if ranks > 1:
        env.setdefault("OMP_NUM_THREADS", env.get("SLURM_CPUS_PER_TASK", str(max(1, cores // ranks))))


def _first_number(count: str) -> int:
    return int(count.partition("(")[0].partition(",")[0])


def started_by(env: MutableMapping[str, str]) -> str:
    """The program that started this process beside its other ranks; the innermost, where one started another."""
    inner = [launcher for launcher, name in MARKS.items() if name in env]
    outer = [launcher for launcher, n in LAUNCHERS.items() if {n.rank, n.size, n.local_rank} <= env.keys()]
    return (inner + outer + ["none" if env.get("WORLD_SIZE", "1") == "1" else "another"])[0]


def own_programs_first(env: MutableMapping[str, str]) -> None:
    """Let those of this Python's environment be found before others, as in a shell where it is active.

    A launcher that comes by ssh activates nothing. Without ninja no C++ part is built, and another version of it than the last
    time builds all parts anew.
    """
    own, path = str(Path(sys.executable).parent), env.get("PATH", os.defpath)
    if own not in path.split(os.pathsep):
        env["PATH"] = own + os.pathsep + path


def _first_node(env: MutableMapping[str, str], names: Names) -> str:
    """The host of rank 0; empty if it cannot be told."""
    if env[names.size] == env.get(names.local_size):
        return "127.0.0.1"
    return first_host(env.get(names.nodes, ""))


def first_host(nodes: str) -> str:
    """The first of a list as Slurm writes it: `gpu[07-09,12],login` gives gpu07. Source: Slurm, scontrol(1), hostlists."""
    while found := re.match(r"([^,\[]*)\[(\w+)[^\]]*\]([^,]*)", nodes):
        nodes = "".join(found.groups())
    return nodes.partition(",")[0]


def _port(env: MutableMapping[str, str], names: Names) -> int:
    """The same for all ranks of a run; two runs on a node have two, where the launcher tells them apart."""
    run = "".join(env.get(name, "") for name in (names.run, "SLURM_STEP_ID"))
    return PORTS[zlib.crc32(run.encode()) % len(PORTS)]
