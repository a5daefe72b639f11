"""The hostfile of deepspeed's launcher, looked at before anything starts: all that is wrong with it, and nodes out of reach."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wandistiller.problems import ConfigError, readable

LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")
"""What deepspeed 0.19.8 takes for a node."""
VARIABLE = re.compile(r"\s*[A-Za-z_]\w*\s*=.*")
"""The only kind of line that it takes in a .deepspeed_env."""
SECONDS = 10
"""For a node to answer."""


def read_hostfile(file: Path) -> dict[str, int]:
    """The nodes in order, and the processes of each.

    Raises:
        ConfigError: with every line that is wrong.
    """
    with readable(file):
        lines = [line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    nodes: dict[str, int] = {}
    found = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        where = f"{file}, line {number}"
        if not (said := LINE.fullmatch(line)):
            found.append(f"{where}: `{line}` is no node. Write its name and its processes: `gpu01 slots=8`.")
        elif said[1] in nodes:
            found.append(f"{where}: `{said[1]}` is there a second time. Leave one line of each node, with all its slots.")
        elif not int(said[2]):
            found.append(f"{where}: `{said[1]}` has no slots. Write how many processes run there, or leave the line out.")
        else:
            nodes[said[1]] = int(said[2])
    if not nodes and not found:
        found = [f"{file}: names no node. Write one a line: `gpu01 slots=8`."]
    if found:
        raise ConfigError(*found)
    return nodes


def env_files() -> list[Path]:
    """Where deepspeed's launcher looks for variables that all nodes get."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    return [file for file in (Path.home() / name, Path(name)) if file.is_file()]


def require_env(files: list[Path]) -> None:
    """A comment or an empty line ends deepspeed's launcher (deepspeed 0.19.8), or becomes a part of what the nodes are told.

    Raises:
        ConfigError: with every line that is no variable.
    """
    lines = [(file, n, line) for file in files for n, line in enumerate(file.read_text(errors="replace").splitlines(), 1)]
    found = [f"{file}, line {n}: `{line}` is no variable. Write NAME=VALUE; comments and empty lines are not understood there."
             for file, n, line in lines if not VARIABLE.fullmatch(line)]  # fmt: skip
    if found:
        raise ConfigError(*found)


def require_pdsh() -> None:
    """The program by which deepspeed's launcher reaches several nodes.

    Raises:
        ConfigError: it is not there.
    """
    if not shutil.which("pdsh"):
        raise ConfigError("There is no pdsh here, by which the deepspeed launcher reaches the nodes. Debian, Ubuntu: apt install "
                          "pdsh. Or start launch/no_ssh.sh on each node.")  # fmt: skip


def require_reach(file: Path, nodes: Iterable[str], port: int | None = None) -> None:
    """Log in to all nodes at once, as deepspeed's launcher does.

    Args:
        port: of the nodes' ssh servers, if not as ssh's own settings say.
    Raises:
        ConfigError: with every node that does not let us in within SECONDS.
    """
    nodes = list(nodes)
    with ThreadPoolExecutor(min(32, len(nodes))) as pool:
        answers = list(pool.map(lambda node: _refusal(node, port), nodes))
    found = [f"{file}: `{node}` cannot be reached: {why}. `ssh {node}` must get in without a password: mend its name, or give it "
             f"your key with `ssh-copy-id {node}`." for node, why in zip(nodes, answers, strict=True) if why]  # fmt: skip
    if found:
        raise ConfigError(*found)


def _refusal(node: str, port: int | None) -> str:
    """Why a node does not let us in; empty if it does."""
    at = ["-p", str(port)] if port else []
    words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS}", *at, node, "true"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=2 * SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return "there is no ssh here"
    except subprocess.TimeoutExpired:
        return f"no answer in {2 * SECONDS} s"
    said = done.stderr.strip().splitlines() or [f"ssh ends with {done.returncode}"]
    return said[-1].strip().rstrip(".") if done.returncode else ""
