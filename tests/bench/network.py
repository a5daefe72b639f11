"""Bytes between ranks and nodes in a step of each shipped JSON, counted.

    sudo env PATH=$PATH python tests/bench/network.py                 # a quarter of an hour on two cores
    sudo env PATH=$PATH python tests/bench/network.py --students zero2 zero3 --teachers replicated

One node with two ranks, and two nodes with two ranks each: network namespaces joined by one virtual cable, on
which the kernel counts every byte (so root is needed), and process namespaces, by which ranks know their
node. A rank sends the first number, a node the second. DeepSpeed's comms logger adds tensor sizes by
collective, without those that bypass it (an owner's, and a few numbers of each step for logs).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import head, parser, row
from planned import pipeline, recipe
from ranks import ROOT, STUDENTS, TEACHERS, environment, free_port, write_json

from wandistiller.utils.files import read_json

MIB = 2**20
NEAR = "zero3, zero_hpz_partition_size 2"
"""A second part of the weights on the ranks of each node."""
SPACE, CABLE, ADDRESS = "wandistiller{}", "cable", "10.203.0.{}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_nodes() -> Iterator[None]:
    """Two network namespaces with a cable."""
    try:
        for node in range(2):
            ip("netns", "add", SPACE.format(node))
        ends = [["netns", SPACE.format(node), "name", CABLE] for node in range(2)]
        ip("link", "add", *ends[0][2:], *ends[0][:2], "type", "veth", "peer", *ends[1][2:], *ends[1][:2])
        for node in range(2):
            inside = "-n", SPACE.format(node)
            ip(*inside, "addr", "add", f"{ADDRESS.format(node + 1)}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                ip(*inside, "link", "set", device, "up")
        yield
    finally:
        for node in range(2):
            subprocess.run(["ip", "netns", "delete", SPACE.format(node)], check=False)


def run(given: Path, nodes: int) -> list[dict]:
    """The bytes that each rank counted."""
    port, started = free_port(), []
    for node in range(nodes):
        words = ["ip", "netns", "exec", SPACE.format(node)]
        words += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node_rank={node}"]
        words += ["--nproc_per_node=2", f"--master_addr={ADDRESS.format(1)}", f"--master_port={port}"]
        words += ["tests/helpers/on_ranks/network.py", str(given)]
        env = environment(GLOO_SOCKET_IFNAME=CABLE)
        with given.with_name(f"node{node}.log").open("w") as out:
            started.append(subprocess.Popen(words, cwd=ROOT, env=env, stdout=out, stderr=out))
    codes = [process.wait() for process in started]
    assert not any(codes), (codes, given.with_name("node0.log").read_text()[-3000:])
    return [json.loads((given.parent / f"sent_{rank}.json").read_text()) for rank in range(2 * nodes)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, default=Path("runs/bench_network"))
    made.add_argument("--students", nargs="*", default=STUDENTS)
    placed = [name for name in TEACHERS if not name.startswith("device_map")]
    made.add_argument("--teachers", nargs="+", default=placed)
    args = made.parse_args()
    if os.geteuid():
        sys.exit("Only root may make network namespaces; see the first lines of this file.")
    folder = args.folder.absolute()
    wan = pipeline(folder, 512, 2)
    students = [*args.students, *[NEAR] * ("zero3" in args.students)]
    pairs = [(s, "replicated") for s in students] + [("zero2", t) for t in args.teachers if t != "replicated"]
    heads = "one node: a rank sends, MiB", "two: a node sends", "comms logger, two nodes"
    head("student, teacher", *heads)
    with two_nodes():
        for student, teacher in pairs:
            shipped, steps = student.partition(",")[0], {"max_steps": 3, "sample_every": 9, "save_every": 9}
            given = recipe(folder, wan, 2, shipped, teacher, **steps)
            if student == NEAR:
                given["deepspeed_config"] = ds = read_json(given["deepspeed_config"])
                ds["zero_optimization"]["zero_hpz_partition_size"] = 2
            cells = []
            for nodes in (1, 2):
                seen = run(write_json(folder / "run.json", given), nodes)
                rank = seen[0]["sent"]["lo"] / 2
                node = sum(seen[2 * n]["sent"][CABLE] for n in range(nodes)) / nodes
                cells.append(f"{(rank, node)[nodes - 1] / MIB:.1f}")
            large = {name: size for name, size in sorted(seen[0]["ops"].items()) if size > MIB / 20}
            ops = ", ".join(f"{name} {size / MIB:.1f}" for name, size in large.items())
            row(f"{student}, {teacher}", *cells, ops)


if __name__ == "__main__":
    main()
