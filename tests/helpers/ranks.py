"""Start real processes on this machine; a failure shows what every rank printed."""

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from simulated import Simulated
from zygote import Rank, fork

from wandistiller.teacher.strategies import teacher_jsons

ROOT = Path(__file__).parents[2]
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
"""The GPUs of the test process at its start: a command that runs in it, on the CPU, hides them."""


def environment(**more: str) -> dict[str, str]:
    """One thread a rank (two ranks must not fight for two cores); the CPU unless there is a GPU for each.

    What puts simulated GPUs into this process itself is on its PYTHONPATH.
    """
    mine = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the test process's
    usual = {k: v for k, v in os.environ.items() if k not in mine}
    on_gpu = more.get("DS_ACCELERATOR") == "cuda"
    usual["CUDA_VISIBLE_DEVICES"] = VISIBLE if on_gpu else ""
    if usual["CUDA_VISIBLE_DEVICES"] is None:
        del usual["CUDA_VISIBLE_DEVICES"]
    usual |= {} if on_gpu and "SIMULATED_GPUS" in usual else {"PYTHONPATH": str(ROOT)}
    return usual | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | more


def wandistiller(
    *arguments: str | Path,
    ranks: int = 1,
    code: int = 0,
    cwd: Path = ROOT,
    accelerator: str | Simulated = "cpu",
) -> subprocess.CompletedProcess:
    """Run our command on `ranks` processes; each must exit with `code` (1 on several ranks: by torchrun)."""
    words, gpus = [str(a) for a in arguments], accelerator if isinstance(accelerator, Simulated) else None
    if (gpus or accelerator == "cpu") and (ranks == 1 or code != 1) and _hub() == HUB:
        return _forked(["wandistiller", *words], ranks, code, cwd, gpus)
    start = launcher(ranks) if ranks > 1 else [sys.executable]
    more = gpus.environment() if gpus else {"DS_ACCELERATOR": accelerator}
    return run([*start, "-m", "wandistiller", *words], code=code, cwd=cwd, **more)


def _hub() -> dict[str, str]:
    """Environment variables that libraries read when they are imported."""
    return {k: v for k, v in os.environ.items() if k.startswith("HF_")}


HUB = _hub()


def program(file: Path, *arguments: str | Path, ranks: int, gpus: Simulated | None = None) -> None:
    """Run a Python file on `ranks` processes, which may have simulated GPUs."""
    _forked([str(file), *map(str, arguments)], ranks, 0, ROOT, gpus)


def call(
    function: Callable[..., Any], *arguments: Any, ranks: int, start: Callable[..., Any] = program
) -> list[Any]:
    """Call a function of a helper on `ranks` processes of one process group; return each rank's result.

    Args:
        start: like `program`, which it is unless a test has its own way to start the ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, arguments)))
        start(Path(__file__).with_name("call_on_rank.py"), folder, ranks=ranks)
        return [pickle.loads(Path(folder, f"rank_{rank}").read_bytes()) for rank in range(ranks)]


def _forked(
    words: list[str], ranks: int, code: int, cwd: Path, gpus: Simulated | None = None
) -> subprocess.CompletedProcess:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            variables = where | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            variables |= gpus.environment() if gpus else {}
            started.append(Rank(environment(**variables), f"{folder}/{rank}.out", f"{folder}/{rank}.err"))
        codes = fork(words, cwd, started, bool(gpus))
        out, err = (
            "".join(Path(file).read_text(errors="replace") for file in files)
            for files in zip(*((r.out, r.err) for r in started), strict=True)
        )
    assert set(codes) == {code}, f"exit codes {codes}\n{' '.join(words)}\n{out}\n{err}"
    return subprocess.CompletedProcess(words, code, out, err)


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST_PORT = 10_000 + WORKER % 10 * 1000 + os.getpid() % 10 * 100
PORTS = cycle(range(FIRST_PORT, FIRST_PORT + 100))
"""Of this process alone, and below those that the system gives to any connection."""


def free_port() -> int:
    """A port that nothing uses, and nothing takes before it is used."""
    for port in islice(PORTS, 100):
        with suppress(OSError), socket.socket() as free:
            free.bind(("", port))
            return port
    raise RuntimeError(f"none of 100 ports from {FIRST_PORT} is free")


def launcher(ranks: int) -> list[str]:
    """The words before a program that start it on `ranks` processes."""
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    return [*start, f"--master_port={free_port()}"]


def train_words(recipe: Path, ranks: int = 1) -> list[str]:
    """The words that train by a recipe, under torchrun if on several ranks."""
    start = launcher(ranks) if ranks > 1 else [sys.executable]
    return [*start, "-m", "wandistiller", "train", "--recipe", str(recipe)]


def run(
    words: list[str], code: int = 0, cwd: Path = ROOT, timeout: float | None = 1200, **env: str
) -> subprocess.CompletedProcess:
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=cwd, env=environment(**env), timeout=timeout
    )
    assert done.returncode == code, (
        f"exit code {done.returncode}\n{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    )
    return done


@cache
def has_async_io() -> bool:
    """Return whether a teacher can be on NVMe here: DeepSpeed's async_io needs libaio and a compiler."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return AsyncIOBuilder().is_compatible(verbose=False)


STUDENTS = sorted(p.stem for p in (ROOT / "ds_configs" / "student").glob("zero*.json"))
"""The shipped student JSONs, one for each ZeRO layout."""
TEACHERS = [name for name in teacher_jsons() if name not in ("auto", "streamed_int8", "streamed_nf4")]
"""The shipped teacher JSONs, one for each place of its weights as they are."""


def runs_here(name: str) -> bool:
    """Return whether this machine has all that a shipped student or teacher JSON needs."""
    return not name.endswith("_nvme") or has_async_io()


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, one a step, as a reader that knows JSON alone sees them."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def losses(output: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in metrics(output)]


def write_json(file: Path, value: Any) -> Path:
    file.write_text(json.dumps(value))
    return file


def edit_json(file: Path, **changes: Any) -> Path:
    """Change keys of a JSON file."""
    return write_json(file, json.loads(file.read_text()) | changes)
