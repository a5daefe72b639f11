"""Call a function of a benchmark in processes of its own, whose memory nothing has used before."""

from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def in_new_processes(function: Callable[..., Any], *arguments: Any, ranks: int = 1) -> list[Any]:
    """Start ranks by torch's launcher; return what `function` returns on each."""
    where = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0"}
    config = LaunchConfig(1, 1, ranks, run_id="fresh", start_method="spawn", local_addr="127.0.0.1", **where)
    by_rank = elastic_launch(config, function)(*arguments)
    return [by_rank[rank] for rank in range(ranks)]
