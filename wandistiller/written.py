"""What a run writes and keeps on disk: its cache, its checkpoints, the finished student. By arithmetic, before it starts."""

import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from wandistiller import distributed
from wandistiller.config import read_json
from wandistiller.deepspeed_json import on_nvme
from wandistiller.items import Kind
from wandistiller.job import Job
from wandistiller.machine import GIB, Machine, disk, disk_free
from wandistiller.memory import optimizer_states
from wandistiller.pipeline_parts import text_config
from wandistiller.planner import student_network
from wandistiller.rehearsal import text_encoding
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
    copied: int = 0
    """The finished student's text encoder, tokenizer and VAE, where they cannot be links to the teacher's."""

    @property
    def output(self) -> int:
        """What lies in the output folder, beside the cache."""
        return self.checkpoint * self.checkpoints + self.frozen + self.student + self.copied

    @property
    def whole(self) -> int:
        return self.cache + self.output

    def __str__(self) -> str:
        return (f"cache {_size(self.cache)}, {self.checkpoints} checkpoint(s) at a time of {_size(self.checkpoint)}, "
                f"{f'frozen weights {_size(self.frozen)}, ' if self.frozen else ''}student {_size(self.student)}"
                f"{f', copies of text encoder and VAE {_size(self.copied)}' if self.copied else ''}")  # fmt: skip


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.0f} MiB"


def written(job: Job, *, accelerator: bool, here: bool = False) -> Written:
    """What `job` writes.

    Args:
        accelerator: prompts are encoded in bf16 there, on a CPU in float32.
        here: on this machine, where the teacher may be on another disk than the output.
    """
    r, experts = job.run, len(job.student_experts)
    network, made = student_network(job), -(-r.max_steps // r.save_every)
    trained, frozen = (sum(part.values()) for part in network)
    each = trained * (4 + optimizer_states(job.student_ds) + (4 if r.ema is not None else 0))
    return Written(_cache(job, accelerator), experts * each, min(made, r.keep_checkpoints + 1), 4 * experts * frozen,
                   2 * experts * count_parameters(job.student_transformer),
                   _copied(job) if here and disk(job.folder.path) != disk(job.output) else 0)  # fmt: skip


def _copied(job: Job) -> int:
    """What is in the teacher's folders; of a hub id that is not here yet the text encoder's weights, by far the most."""
    if any((job.folder.path / "text_encoder").glob("*.safetensors")):
        return sum(_there(job.folder.path / part) for part in ("vae", "text_encoder", "tokenizer"))
    return text_encoding(text_config(job.folder.path), torch.bfloat16, accelerator=True).weights


def on_its_disk(machine: Machine, job: Job, swap: Path | None) -> Machine:
    """`machine` with the disk that the run swaps to, and those of the run's files that go there too. Collective.

    Args:
        swap: a folder of this machine; None: `machine` is another, which has one disk.
    """
    accelerator = machine.device_free is not None
    if swap is None:
        return replace(machine, files=written(job, accelerator=accelerator).whole)
    files = distributed.gather_objects(to_come(job, accelerator=accelerator) if distributed.rank() == 0 else {})[0]
    found = distributed.gather_objects((disk_free(swap), beside(swap, files)))
    return replace(machine, disk_free=min(free for free, _ in found), files=max(n for _, n in found))


def swap_folder(job: Job, shipped: bool = False) -> Path:
    """Where the run swaps to; of several folders that whose disk has the least room.

    Args:
        shipped: the shipped JSONs' folders are among them, as the run may come to use those.
    """
    jsons = [job.student_ds, job.teacher_ds]
    if shipped or not any(map(on_nvme, jsons)):
        jsons += [read_json(f"ds_configs/{name}.json") for name in ("student/zero3_nvme", "teacher/zero_inference_nvme")]
    sections = [ds.get("zero_optimization", {}).get(key, {}) for ds in jsons for key in ("offload_param", "offload_optimizer")]
    return min((Path(section["nvme_path"]) for section in sections if section.get("device") == "nvme"), key=disk_free)


def to_come(job: Job, *, accelerator: bool) -> dict[Path, int]:
    """Bytes that `job` will write on this machine by folder, without what lies there already, of this run or another."""
    need = written(job, accelerator=accelerator, here=True)
    return {job.cache: max(0, need.cache - _there(job.cache)),
            job.output: max(0, need.output - _there(job.output / "checkpoints"))}  # fmt: skip


def beside(swap: Path, files: dict[Path, int]) -> int:
    """Bytes of `files`, by folder, that go to the disk of the folder `swap`."""
    return sum(nbytes for folder, nbytes in files.items() if disk(folder) == disk(swap))


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
    still = to_come(job, accelerator=accelerator)
    disks = {disk(place): place for place in still}
    free = [f"{_size(disk_free(place))} free at {place}{', TOO LITTLE' * (beside(place, still) > disk_free(place))}"
            for place in disks.values()]  # fmt: skip
    return f"disk      {written(job, accelerator=accelerator, here=True)}; {', '.join(free)}"


def _there(folder: Path) -> int:
    """Bytes of the files in it, a file with several names once."""
    found = {}
    for top, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it went away, or we may not look
                file = os.stat(f"{top}/{name}")
                found[file.st_dev, file.st_ino] = file.st_size
    return sum(found.values())
