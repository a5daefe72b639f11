"""Rank variables of srun and Open MPI's mpirun, translated into those that torchrun and deepspeed set."""

import errno
import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping, MutableMapping
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


def environment_problems(env: Mapping[str, str]) -> list[str]:
    """List the variables of launchers that are missing, and problems of the address and the port in them."""
    if "RANK" not in env:
        return []
    if lost := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]:
        return [
            f"environment: RANK is set, but {' and '.join(lost)} is not. Start with deepspeed, torchrun, "
            "srun or mpirun, or unset RANK for one process."
        ]
    return _address_problems(env) if int(env["WORLD_SIZE"]) > 1 else []


def _address_problems(env: Mapping[str, str]) -> list[str]:
    """List the problem of an address that is not known here, or of a port that is not free on rank 0."""
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return [
            f"environment: MASTER_ADDR is {host!r}, which this machine does not know: {reason}. Give the "
            "first node's name or address: deepspeed --master_addr HOST, torchrun --rdzv_endpoint HOST:PORT."
        ]
    if int(env["RANK"]) or env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself has the port
        return []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return []
            return [
                f"port {port} of this machine, where the ranks are to meet, is in use, perhaps by another "
                f"run. Give this one a port of its own: deepspeed --master_port {port + 1}, or MASTER_PORT."
            ]
    return []


def set_rank_variables(env: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in processes started by srun or mpirun.

    Raises:
        ConfigError: ranks on several nodes, and the launcher does not say which node is the first.
    """
    if "RANK" in env or not (launcher := next(iter(_present(env)), None)):
        return
    for name, theirs in zip(TORCHRUN, LAUNCHERS[launcher], strict=True):
        env[name] = re.match(r"\d+", env[theirs])[0]  # Slurm writes `4(x2),3` for three nodes
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


def is_first(env: Mapping[str, str]) -> bool:
    """Return whether this is rank 0, by the variables of any launcher, before `set_rank_variables`."""
    launcher = next(iter(_present(env)), None)
    return env.get("RANK", env[LAUNCHERS[launcher][0]] if launcher else "0") == "0"


def _present(env: Mapping[str, str]) -> list[str]:
    return [launcher for launcher, names in LAUNCHERS.items() if env.keys() >= {*names}]


def started_by(env: MutableMapping[str, str]) -> str:
    """Name the program that started this process; the innermost, where one started another."""
    inner = [launcher for launcher, name in MARKS.items() if name in env]
    return [*inner, *_present(env), "none" if env.get("WORLD_SIZE", "1") == "1" else "another"][0]


def share_cores(env: MutableMapping[str, str], cores: int) -> None:
    """Set OMP_NUM_THREADS, if unset, to this rank's share of the node's cores; before torch is imported."""
    sizes = (re.match(r"\d{1,9}", env.get(name, "")) for name in LOCAL_SIZES)
    ranks = next((int(size[0]) for size in sizes if size), 1)
    if ranks > 1:
        env.setdefault("OMP_NUM_THREADS", env.get("SLURM_CPUS_PER_TASK", str(max(1, cores // ranks))))


def own_programs_first(env: MutableMapping[str, str]) -> None:
    """Put this Python's programs, such as ninja, first on PATH: launchers by ssh activate no environment."""
    programs, path = str(Path(sys.executable).parent), env.get("PATH", os.defpath)
    if programs not in path.split(os.pathsep):
        env["PATH"] = programs + os.pathsep + path


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: gpu07 of `gpu[07-09,12],login`. Source: scontrol(1)."""
    first = re.match(r"(?:\[[^\]]*\]|[^,])*", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
