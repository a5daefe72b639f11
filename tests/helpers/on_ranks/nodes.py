"""Called on ranks, each of them a node: the folder is an NFS server's, and all but rank 0 are its clients."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from nfs_client import nfs_client
from torch import Tensor
from trainers import trainer_of

from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import Size
from wandistiller.data.tensor_cache import MediaCache, Sample
from wandistiller.distributed import collectives
from wandistiller.utils.errors import Problems


@contextmanager
def a_node_each(folder: Path) -> Iterator[None]:
    collectives.node_peers = lambda: [collectives.rank()]
    with nfs_client(folder) if collectives.rank() else nullcontext():
        yield


def cached(folder: Path, keys_by_rank: list[list[str]], lost: str = "") -> dict[str, float] | list[str]:
    """Fill a cache with the numbers of keys; return what this rank reads of each, or the problems.

    Args:
        keys_by_rank: of the samples, as each rank finds them.
        lost: a key whose tensors are gone once they are written.
    """

    def encoder() -> Any:
        return lambda sample: {"x0": torch.tensor([float(sample.item.prompt)])}

    class Cache(MediaCache):
        def write(self, tensors: dict[str, dict[str, Tensor]], about: dict[str, str]) -> None:
            if lost not in tensors:
                super().write(tensors, about)

    keys = keys_by_rank[collectives.rank()]
    samples = {key: Sample(PromptItem(f"{number}"), Size(32, 32, 1)) for number, key in enumerate(keys)}
    with a_node_each(folder):
        cache = Cache(folder / "cache" / "latents", folder / "cache" / "unusable.json", 1)
        try:
            cache.fill(samples, lambda sample: Path(sample.item.prompt), encoder, "numbers")
            return {key: cache.read(key, "x0")[0].item() for key in keys}
        except Problems as error:
            return error.problems


def first_checkpoint(folder: Path, values: dict[str, Any]) -> list[str]:
    """Train by a recipe from its start; return the names of its checkpoints as this rank finds them."""
    with a_node_each(folder):
        trainer_of(values).train()
        return sorted(file.name for file in (folder / "run" / "checkpoints").glob("step_*"))
