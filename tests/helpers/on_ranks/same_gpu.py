"""Called on ranks by test_device.py, before they are connected: GPUs by name, where there are none."""

import os
from unittest.mock import patch

from torch.distributed import TCPStore

from wandistiller.distributed import device
from wandistiller.utils.errors import ConfigError


def compared(names: list[str], port: int) -> list[str]:
    """Compare the ranks' GPUs, named by rank; return the messages on this rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore("127.0.0.1", port, world, rank == 0)
    problems: list[str] = []
    with patch.object(device, "identity", lambda: names[rank]):
        try:
            device.require_own_gpu(store, rank, world)
        except ConfigError as error:
            problems = error.problems
    if not problems:
        store.set(f"read/{rank}", "")
        if rank == 0:  # which has the store
            store.wait([f"read/{other}" for other in range(world)])
    return problems
