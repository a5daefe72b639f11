"""The check that the ranks of a run were all given the same settings and data."""

import dataclasses
from typing import Any

from wandistiller.config.identity import identity, resolved
from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest

PLACES = ("_dir", "_path")
"""Endings of keys that may differ between nodes: what is found there is compared, not where it lies."""
SHOWN = 8
"""Greatest number of keys, and of ranks, that are named."""


def require_same(stages: list[Job], *, weights: bool = True) -> None:
    """Compare what the ranks have read, of all stages, and the checkpoints that they go on from. Collective.

    Args:
        weights: compare the teachers' too, which are checked then.
    Raises:
        ConfigError: on all ranks; it names what differs, and the ranks that have other settings than rank 0.
    """
    if collectives.world_size() == 1:
        return
    own = {
        f"{job.stage}.{key}".lstrip("."): digest(value)
        for job in stages
        for key, value in _read(job).items()
        if weights or key != "teacher"
    }
    first, *others = collectives.gather_objects(own)
    differ = [[f"`{k}`" for k in first | theirs if first.get(k) != theirs.get(k)] for theirs in others]
    if ranks := [rank for rank, keys in enumerate(differ, start=1) if keys]:
        keys = [*dict.fromkeys(key for of_rank in differ for key in of_rank)]
        raise ConfigError(
            f"The ranks read different settings or data: {_some(keys)}, on rank {_some(ranks)} other than on "
            "rank 0. A file changed while the run started, or the nodes do not see the same files, or were "
            "given other flags. Give all the same, and start again."
        )


def _read(job: Job) -> dict[str, Any]:
    settings = dataclasses.asdict(job.run) | resolved(job) | identity(job)
    settings |= {"resume": job.resume_from and job.resume_from.name, "is_spent": job.is_spent}
    return {k: v for k, v in settings.items() if not k.endswith(PLACES) and k != "log_level"}


def _some(items: list[Any]) -> str:
    return ", ".join(map(str, items[:SHOWN])) + ", ..." * (len(items) > SHOWN)
