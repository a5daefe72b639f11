"""Two nodes, here two names of this machine, each with a launcher of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from background_run import PATIENCE
from on_ranks.nodes import first_checkpoint
from ranks import ROOT, call, environment, free_port, losses, run
from recipes import recipe, recipe_file, train

from wandistiller.distributed.watchdog import GONE_SECONDS

TOOLS = {"pdsh": "pdsh", "sshd": "openssh-server", "ssh": "openssh-client"}
SBIN = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [package for tool, package in TOOLS.items() if not shutil.which(tool, path=SBIN)]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


class Ssh(NamedTuple):
    port: int
    path: str
    """With an ssh first that has the key, and knows `here` and `there` as names of this machine."""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ssh]:
    """A server on 127.0.0.1 that knows one key."""
    if MISSING:
        pytest.skip(f"needs {', '.join(MISSING)} (Debian: apt install {' '.join(MISSING)})")
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    for name in ("host", "user"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)])
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = {
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": folder / "pid",
        "PermitRootLogin": "yes",
        "ListenAddress": "127.0.0.1",
        "Port": port,
    }
    client = {
        "IdentityFile": folder / "user",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
        "Host": "here there",
        "HostName": "127.0.0.1",
    }
    for name, options in (("sshd_config", server), ("ssh_config", client)):
        (folder / name).write_text("".join(f"{key} {value}\n" for key, value in options.items()))
    (folder / "bin").mkdir()
    own = folder / "bin" / "ssh"
    own.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
    own.chmod(0o755)
    daemon = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", folder / "sshd_config"])
    wait_for_port(port)
    yield Ssh(port, f"{folder / 'bin'}:{PATH}")
    daemon.terminate()
    daemon.wait()


def wait_for_port(port: int) -> None:
    """Until a server listens."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < until, f"nothing listens on {port}"
            time.sleep(0.1)


def hostfile(folder: Path, *lines: str) -> Path:
    file = folder / "hostfile"
    file.write_text("\n".join(lines) + "\n")
    return file


def started(folder: Path, recipe_file: Path) -> list[subprocess.Popen]:
    """Each node's launcher, in a process group of its own."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PATH": PATH,
        "HOSTFILE": str(hostfile(folder, "here slots=1", "there slots=1")),
    }
    words, nodes = ["bash", "launch/no_ssh.sh", "train", "--recipe", recipe_file], []
    for node in range(2):
        env = environment(**shared, NODE_RANK=str(node))
        with (folder / f"node{node}.log").open("w") as out:
            streams = {"stdout": out, "stderr": out}
            nodes.append(subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **streams))
    return nodes


@pytest.fixture(scope="module")
def on_one_node(wan1: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks of one node."""
    return losses(train(tmp_path_factory.mktemp("one_node"), wan1, max_steps=3))


@pytest.mark.slow
def test_two_nodes_without_ssh_have_the_losses_of_one(
    wan1: Path, tmp_path: Path, on_one_node: list[float]
) -> None:
    nodes = started(tmp_path, recipe_file(tmp_path, wan1, max_steps=3))
    codes = [node.wait(600) for node in nodes]
    assert codes == [0, 0], "\n".join((tmp_path / f"node{node}.log").read_text() for node in range(2))
    assert losses(tmp_path / "run") == on_one_node


def by_pdsh(ssh: Ssh, folder: Path, file: Path, options: str, *flags: str) -> str:
    """The output of `train`, started by launch/deepspeed.sh on the nodes that the options leave."""
    comment = "# two names of this machine, and a dead node"
    nodes = hostfile(folder, comment, "here slots=1", "there slots=1", "dead.invalid slots=8")
    for link in ("launch", "wandistiller", "ds_configs"):
        (folder / link).symlink_to(ROOT / link)
    exported = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    built = ("TORCH_EXTENSIONS_DIR",)  # else CPU Adam is built again
    exported |= {key: os.environ[key] for key in built if key in os.environ}
    (folder / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in exported.items()))
    words = ["bash", "launch/deepspeed.sh", "train", "--recipe", str(file), *flags]
    options += f" --master_addr 127.0.0.1 --master_port {free_port()}"
    env = {"PATH": ssh.path, "HOSTFILE": str(nodes), "SSH_PORT": str(ssh.port), "DEEPSPEED": options}
    done = run(words, cwd=folder, **env)
    return done.stdout + done.stderr


@pytest.mark.multinode
def test_two_nodes_reached_by_pdsh_have_the_losses_of_one(
    ssh: Ssh, wan1: Path, tmp_path: Path, on_one_node: list[float]
) -> None:
    by_pdsh(ssh, tmp_path, recipe_file(tmp_path, wan1, max_steps=3), "--exclude dead.invalid")
    assert losses(tmp_path / "run") == on_one_node


@pytest.mark.multinode
def test_a_node_that_is_left_alone_does_the_work_itself(ssh: Ssh, wan1: Path, tmp_path: Path) -> None:
    """Deepspeed's launcher would do it on the machine where it was called."""
    output = by_pdsh(ssh, tmp_path, recipe_file(tmp_path, wan1), "--include there", "--dry_run")
    assert any(line.startswith("there: disk ") for line in output.splitlines()), output


def test_a_new_run_on_a_disk_of_nfs_saves_its_first_checkpoint(wan1: Path, tmp_path: Path) -> None:
    """Where all looked for checkpoints and cache before the first node had made them."""
    own = {"output_dir": str(tmp_path / "run"), "max_steps": 1}
    given = recipe(tmp_path, wan1, **own)
    assert call(first_checkpoint, tmp_path, given, ranks=2) == [["step_00000001"]] * 2


@pytest.fixture
def in_training(wan1: Path, tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    """Both nodes, after a step of a run that has long to go."""
    long = {key: 100_000 for key in ("max_steps", "sample_every", "save_every")}
    nodes = started(tmp_path, recipe_file(tmp_path, wan1, **long))
    lines, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + PATIENCE
    while not (lines.is_file() and lines.read_text()):
        assert time.monotonic() < until, (tmp_path / "node0.log").read_text()
        time.sleep(0.5)
    yield nodes
    for node in nodes:
        with suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()


@pytest.mark.slow
def test_the_death_of_a_node_ends_the_other(in_training: list[subprocess.Popen], tmp_path: Path) -> None:
    """Its system closes its connections, so it is not waited for until GONE_SECONDS are over."""
    os.killpg(in_training[1].pid, signal.SIGKILL)
    code = in_training[0].wait(GONE_SECONDS)
    assert code == 1 and "Rank 1 is gone" in (tmp_path / "node0.log").read_text()


@pytest.mark.slow
def test_the_first_node_s_silence_ends_the_other(in_training: list[subprocess.Popen], tmp_path: Path) -> None:
    """Nothing closes its connections, as with a host without power. The rendezvous store is on that node."""
    os.killpg(in_training[0].pid, signal.SIGSTOP)
    code = in_training[1].wait(PATIENCE)
    assert code == 1 and "Rank 0 is gone" in (tmp_path / "node1.log").read_text()


@pytest.mark.parametrize("script", ["deepspeed", "no_ssh"])
def test_a_hostfile_that_does_not_exist_is_one_message(tmp_path: Path, script: str) -> None:
    """DeepSpeed's launcher would train on each node alone."""
    where = {"HOSTFILE": f"{tmp_path}/hostfile", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "PATH": PATH}
    done = run(["bash", f"launch/{script}.sh", "train", "--recipe", "none.json"], code=2, **where)
    assert done.stderr.startswith(f"error: {tmp_path}/hostfile: no such file.")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["deepspeed", "no_ssh"])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["# nodes", "", "gpu01 slots=8", "gpu02 slot=8"], ", line 4: `gpu02 slot=8`. Write a node and its"),
        (["gpu01"], ", line 1: `gpu01`. Write a node and its number of processes, such as: gpu01 slots=8"),
        (["gpu01 slots=8", "gpu01 slots=8"], ", line 2: gpu01 is there twice. Keep one."),
        (["# nodes"], ": no node in it. Write one a line, such as: gpu01 slots=8"),
    ],
    ids=["a misspelt word", "no slots", "a node twice", "no node"],
)
def test_a_wrong_hostfile_is_one_message(lines: list[str], message: str, script: str, tmp_path: Path) -> None:
    where = {
        "HOSTFILE": f"{hostfile(tmp_path, *lines)}",
        "NODE_RANK": "0",
        "MASTER_ADDR": "here",
        "PATH": PATH,
    }
    done = run(["bash", f"launch/{script}.sh", "train"], code=2, **where)
    assert done.stderr.startswith(f"error: {tmp_path}/hostfile{message}")
    assert done.stderr.count("\n") == 1
