"""What a run writes and keeps on disk: its cache, its checkpoints, the finished student. By arithmetic, before it starts."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from wandistiller import distributed
from wandistiller.items import Kind
from wandistiller.job import Job
from wandistiller.machine import GIB, disk_free
from wandistiller.memory import optimizer_states
from wandistiller.pipeline_parts import text_config
from wandistiller.planner import student_network
from wandistiller.wan import TEXT_TOKENS, count_parameters

LOOKED_AT = 1000
"""Prompts from whose length that of all is taken."""


class Written(NamedTuple):
    """Bytes of all ranks together."""

    cache: int
    """Of texts about: a token is taken for four bytes of the prompt."""
    checkpoint: int
    """One of them."""
    checkpoints: int
    """How many there are at a time: those that are kept, and the next before the oldest goes."""
    frozen: int
    """Weights that are not trained, once for all checkpoints."""
    student: int

    @property
    def output(self) -> int:
        """What lies in the output folder, beside the cache."""
        return self.checkpoint * self.checkpoints + self.frozen + self.student

    @property
    def whole(self) -> int:
        return self.cache + self.output

    def __str__(self) -> str:
        return (f"cache {_size(self.cache)}, {self.checkpoints} checkpoint(s) at a time of {_size(self.checkpoint)}, "
                f"{f'frozen weights {_size(self.frozen)}, ' if self.frozen else ''}student {_size(self.student)}")  # fmt: skip


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def written(job: Job, *, accelerator: bool) -> Written:
    """What `job` writes.

    Args:
        accelerator: prompts are encoded in bf16 there, on a CPU in float32.
    """
    r, experts = job.run, len(job.student_experts)
    network, made = student_network(job), -(-r.max_steps // r.save_every)
    trained, frozen = (sum(part.values()) for part in network)
    each = trained * (4 + optimizer_states(job.student_ds) + (4 if r.ema is not None else 0))
    return Written(_cache(job, accelerator), experts * each, min(made, r.keep_checkpoints + 1), 4 * experts * frozen,
                   2 * experts * count_parameters(job.student_transformer))  # fmt: skip


def _cache(job: Job, accelerator: bool) -> int:
    """Latents in float32, with the teacher's paths if they are kept; texts by prompt, without padding."""
    r, items = job.run, job.items
    all_samples = items.samples(r.rollouts_per_prompt)
    used = min(all_samples, r.max_steps * job.batch.total)
    made = int((items.kinds == Kind.PROMPT).sum()) * r.rollouts_per_prompt / all_samples
    x0 = 4 * max(math.prod(job.folder.latent_shape(s.height, s.width, s.num_frames)) for s in (job.size, *job.buckets))
    path = made * r.rollout_steps if r.rollout_path else 0
    looked_at = np.unique(np.linspace(0, len(items) - 1, LOOKED_AT).astype(int))
    tokens = np.mean([min(TEXT_TOKENS, 1 + len(items[int(i)].prompt.encode()) / 4) for i in looked_at])
    token = text_config(job.folder.path)["d_model"] * (torch.bfloat16 if accelerator else torch.float32).itemsize
    return int(used * x0 * (1 + path) + min(used, len(items)) * tokens * token)


def tell(job: Job) -> None:
    """Say on rank 0 what is to come, and what is free where it goes."""
    if distributed.rank() == 0:
        distributed.log0("%s", told(job, accelerator=distributed.device().type != "cpu"))


def told(job: Job, *, accelerator: bool) -> str:
    """The line; what lies there already, of this run or another, is taken off what is to come."""
    need = written(job, accelerator=accelerator)
    still = {job.cache: need.cache - _there(job.cache), job.output: need.output - _there(job.output / "checkpoints")}
    disks: dict[int, tuple[Path, int]] = {}
    for place, to_come in still.items():
        number = next(p for p in (place.absolute(), *place.absolute().parents) if p.is_dir()).stat().st_dev
        disks[number] = place, disks.get(number, (place, 0))[1] + max(0, to_come)
    free = [f"{_size(disk_free(place))} free at {place}{', TOO LITTLE' * (to_come > disk_free(place))}"
            for place, to_come in disks.values()]  # fmt: skip
    return f"disk      {need}; {', '.join(free)}"


def _there(folder: Path) -> int:
    """Bytes of the files in it, a file with several names once."""
    found = {}
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it went away, or we may not look
                file = os.stat(f"{top}/{name}")
                found[file.st_dev, file.st_ino] = file.st_size
    return sum(found.values())
