"""State shared by nodes and owned by each; nodes are process and mount namespaces of this machine."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_ranks.placements import differences
from ranks import ROOT, call, environment, free_port, losses, train_words, wandistiller
from recipes import recipe_file, train

NAMESPACES = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount"]
NODES = [(0, 1), (2,)]
PARTS = {
    "sharded": [3, 3, 3],
    "sharded_node": [2, 2, 1],
    "zero_inference_cpu_node": [2, 2, 1],
    "host_cpu": [1, 1, 1],
    "owner": [1, 0, 1],
}
"""Among how many ranks the weights are cut that each rank has; 0 where it has none."""
HOW = ("float32 1", "bfloat16 2")
"""Precisions and passes of guidance."""
SKIP = bool(subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode)
pytestmark = [
    pytest.mark.multinode,
    pytest.mark.skipif(SKIP, reason="needs the right to make namespaces: run as root"),
]


def on_nodes(
    work: Path, nodes: list[tuple[int, ...]], words: list[Any], before: dict[int, str] | None = None
) -> tuple[list[int], str]:
    """Run `words` on each rank of each node; return the nodes' exit codes, and all output.

    Args:
        before: by node, what its shell does first.
    """
    world = {"WORLD_SIZE": str(sum(map(len, nodes))), "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": str(free_port())}
    program, started = " ".join(map(str, words)), []
    for node, ranks in enumerate(nodes):
        each = [f"RANK={rank} LOCAL_RANK={local} {program} & p{local}=$!" for local, rank in enumerate(ranks)]
        waits = [f"wait $p{local} || code=$?" for local, _ in enumerate(ranks)]
        shell = "\n".join([(before or {}).get(node, ":"), *each, "code=0", *waits, "exit $code"])
        env, words = (
            environment(**world, LOCAL_WORLD_SIZE=str(len(ranks))),
            [*NAMESPACES, "bash", "-c", shell],
        )
        with (work / f"node{node}.log").open("w") as log:
            started.append(subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=env))
    codes = [node.wait(600) for node in started]
    return codes, "\n".join((work / f"node{node}.log").read_text() for node in range(len(nodes)))


# Where a teacher lives


@pytest.fixture(scope="module")
def placed(wan2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each rank's results for each teacher JSON."""
    work = tmp_path_factory.mktemp("nodes")

    def start(program: Path, folder: str, ranks: int) -> None:
        codes, output = on_nodes(work, NODES, [sys.executable, program, folder])
        assert codes == [0, 0], output

    return call(
        differences, wan2, work, [f"{name} {how}" for name in PARTS for how in HOW], ranks=3, start=start
    )


@pytest.mark.parametrize("name", PARTS)
def test_each_node_has_its_own_where_the_json_says_so(placed: list[dict[str, Any]], name: str) -> None:
    assert [of_rank[f"parts of {name}"] for of_rank in placed] == PARTS[name]


@pytest.mark.parametrize("name", PARTS)
def test_wherever_it_lives_its_outputs_are_bitwise_diffusers(placed: list[dict[str, Any]], name: str) -> None:
    assert {of_rank[f"{name} {how}"] for of_rank in placed for how in HOW} == {0}


# Where the cache is


def own_disks(work: Path, *nodes: int) -> dict[int, str]:
    """Mounts that give each of these nodes a folder `local` of its own, `disk0` and so on."""
    (work / "local").mkdir()
    for node in nodes:
        (work / f"disk{node}").mkdir()
    return {node: f"mount --bind {work / f'disk{node}'} {work / 'local'}" for node in nodes}


def test_nodes_with_a_cache_each_train_once_each_has_filled_its_own(wan1: Path, tmp_path: Path) -> None:
    one = train(tmp_path, wan1, "one", max_steps=2)
    file = recipe_file(tmp_path, wan1, max_steps=2, cache_dir=str(tmp_path / "local"))
    disks, words = own_disks(tmp_path, 0, 1), train_words(file)
    codes, output = on_nodes(tmp_path, [(0,), (1,)], words, disks)
    remedy = "run `wandistiller prepare` with this recipe on each node by itself first"
    assert codes == [2, 2] and output.count(remedy) == 1, output
    for disk in disks:
        folders = "--cache_dir", tmp_path / f"disk{disk}", "--output_dir", tmp_path / "made"
        wandistiller("prepare", "--recipe", file, *folders)
    codes, output = on_nodes(tmp_path, [(0,), (1,)], words, disks)
    assert codes == [0, 0], output
    assert losses(tmp_path / "run") == losses(one)
