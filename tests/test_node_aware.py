"""Where a teacher lives on two nodes, here two process namespaces of this machine, of two ranks and of one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT, environment, free_port

OWN_PROCESSES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
NODES = [(0, 1), (2,)]
PARTS = {
    "sharded": [3, 3, 3], "sharded_node": [2, 2, 1], "zero_inference_cpu_node": [2, 2, 1], "host_cpu": [1, 1, 1],
    "owner": [1, 0, 1],
}  # fmt: skip
"""Among how many ranks the weights are cut that each rank has; 0 where it has none."""


@pytest.fixture(scope="module")
def on_two_nodes(wan2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What placements_on_ranks.py found of each teacher JSON."""
    if subprocess.run([*OWN_PROCESSES, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make process namespaces: run as root")
    work, port = tmp_path_factory.mktemp("nodes"), free_port()
    program = " ".join(map(str, [sys.executable, ROOT / "tests" / "placements_on_ranks.py", wan2, work, *PARTS]))
    nodes = []
    for node, ranks in enumerate(NODES):
        each = [f"RANK={rank} LOCAL_RANK={local} {program} & p{local}=$!" for local, rank in enumerate(ranks)]
        waits = [f"wait $p{local} || exit 1" for local, _ in enumerate(ranks)]
        where = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (work / f"node{node}.log").open("w") as log:
            nodes.append(subprocess.Popen([*OWN_PROCESSES, "bash", "-c", "\n".join([*each, *waits])], cwd=ROOT, stdout=log,
                                          stderr=log, env=environment(**where)))  # fmt: skip
    codes = [node.wait(300) for node in nodes]
    assert codes == [0, 0], "\n".join((work / f"node{node}.log").read_text() for node in range(2))
    return json.loads((work / "results.json").read_text())


@pytest.mark.parametrize("name", PARTS)
def test_each_node_has_its_own_where_the_json_says_so(on_two_nodes: dict[str, Any], name: str) -> None:
    assert on_two_nodes[f"parts of {name}"] == PARTS[name]


@pytest.mark.parametrize("name", PARTS)
def test_wherever_it_lives_its_answers_are_bitwise_diffusers(on_two_nodes: dict[str, Any], name: str) -> None:
    differences = [on_two_nodes[f"{name} {precision} {passes}"] for precision in ("float32", "bfloat16") for passes in (1, 2)]
    assert differences == [0, 0, 0, 0]
