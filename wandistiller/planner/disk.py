"""Disk space of a run before it starts, and resources of which its plan needs more than is free."""

import math
import os
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from wandistiller.checkpoint.loading import read_state
from wandistiller.config.job import Job
from wandistiller.distributed import collectives
from wandistiller.distributed.device import local_rank, on_accelerator
from wandistiller.engine.ds_config import shipped_json
from wandistiller.engine.ds_json import DeepSpeedJson
from wandistiller.planner.machine import Demand, Machine, demands, moments, most, this_machine
from wandistiller.planner.peak_memory import plan
from wandistiller.planner.student_memory import MOMENTS
from wandistiller.planner.teacher_memory import added_sizes
from wandistiller.utils.system_memory import SYSTEM, amount, disk, disk_free


class DiskUse(NamedTuple):
    """Bytes of all ranks together."""

    cache: int
    checkpoint: int
    checkpoints: int
    """Number at a time: those that are kept, and the next before the oldest is deleted."""
    student: int
    """The finished student, and the frozen weights, once for all checkpoints."""
    earlier: int = 0
    """Checkpoints and students of the stages before."""

    @property
    def output(self) -> int:
        return self.checkpoint * self.checkpoints + self.student

    @property
    def whole(self) -> int:
        return self.cache + self.output + self.earlier

    def __str__(self) -> str:
        return (
            f"cache {amount(self.cache)}, {self.checkpoints} checkpoint(s) at a time of "
            f"{amount(self.checkpoint)}, student {amount(self.student)}"
            + (f", stages before {amount(self.earlier)}" if self.earlier else "")
        )


def written(job: Job, *, accelerator: bool) -> DiskUse:
    """Files of `job`; prompts are encoded in bf16 with an accelerator, else in float32."""
    run, networks = job.run, job.networks
    network = networks.first.parameters
    experts, trained = len(networks.student), len(networks.learning)
    each = 4 + MOMENTS + (4 if run.ema is not None else 0)
    at_a_time = min(run.max_steps, run.keep_checkpoints + 1)  # `save_minutes` may save any step
    weights = job.student_transformer.numel
    student = 0 if networks.is_teacher_with_adapters(job.folder) else experts * 2 * weights
    if networks.bases:  # the teacher has the other weights; a LoRA file has what was added to them
        added, _ = added_sizes(job.folder, tuple(networks.bases.values()))
        student += 2 * (experts * network.trained_numel + added)
        student += (experts - trained) * 4 * network.trained_numel
    else:
        student += trained * 4 * network.frozen_numel + (experts - trained) * 4 * weights
    checkpoint = trained * each * network.trained_numel
    for other in networks.others.values():
        checkpoint += (4 + MOMENTS) * other.parameters.trained_numel
    files = DiskUse(_cache(job, accelerator), checkpoint, at_a_time, student)
    if not job.previous:
        return files
    before = written(job.previous, accelerator=accelerator)
    return files._replace(cache=max(files.cache, before.cache), earlier=before.earlier + before.output)


def _cache(job: Job, accelerator: bool) -> int:
    """Bytes of latents in float32, of the teacher's paths if kept, and of texts: a token for four bytes."""
    run, items = job.run, job.items
    samples = job.epoch
    used = min(samples, job.updates * job.batch.total)
    from_prompts = int(items.made.sum()) * run.rollouts_per_prompt / samples
    made = from_prompts * min(samples, len(job.updates_with_latents) * job.batch.total)
    states = made * (1 + run.rollout_steps * job.keeps_path) + used * (1 - from_prompts)
    x0 = 4 * max(math.prod(job.folder.latent_shape(*astuple(size))) for size in (job.size, *job.buckets))
    prompts = [items[i].prompt for i in range(0, len(items), 1 + len(items) // 1000)]
    rows = job.folder.config.text_tokens
    tokens = sum(min(rows, 1 + len(prompt.encode()) / 4) for prompt in prompts) / len(prompts)
    state = job.folder.text_width * (2 if accelerator else 4)
    latents = states * x0 if job.updates_with_latents else 0
    frames = 0
    if (config := job.folder.config).takes_image:  # most of it is what is joined to latents
        frames = used * x0 * (config.joined_channels or 1) / config.out_channels
    return int(latents + frames + min(used, len(items)) * tokens * state)


def on_its_disk(machine: Machine, job: Job, swap: Path | None) -> Machine:
    """`machine` with the disk that the run swaps to, and the run's files on that disk. Collective.

    Args:
        swap: a folder of this machine; None: `machine` is another, which has one disk.
    """
    accelerator = machine.device_free is not None
    if swap is None:
        return replace(machine, files=written(job, accelerator=accelerator).whole)
    of_rank_0 = to_come(job, accelerator=accelerator) if collectives.rank() == 0 else {}
    files = collectives.gather_objects(of_rank_0)[0]
    of_ranks = collectives.gather_objects((disk_free(swap), on_disk_of(swap, files)))
    free, nbytes = zip(*of_ranks, strict=True)
    return replace(machine, disk_free=min(free), files=max(nbytes))


def swap_folder(job: Job, shipped: bool = False) -> Path:
    """The folder that the run swaps to; of several the one whose disk has the least room.

    Args:
        shipped: count the folders of the shipped JSONs too, which the run may come to use.
    """
    jsons: list[DeepSpeedJson] = [job.student_engine, job.teacher.engine]
    jsons += [row.engine for row in job.networks.others.values()]
    if shipped or not any(json.on_nvme for json in jsons):
        names = ("student/zero3_nvme", "teacher/zero_inference_nvme")
        jsons += [shipped_json(f"ds_configs/{name}.json") for name in names]
    sections = [json.offload(target) for json in jsons for target in ("param", "optimizer")]
    return min((Path(s["nvme_path"]) for s in sections if s["device"] == "nvme"), key=disk_free)


def to_come(job: Job, *, accelerator: bool) -> dict[Path, int]:
    """Bytes that `job` will still write on this machine, by folder."""
    need = written(job, accelerator=accelerator)
    before = to_come(job.previous, accelerator=accelerator) if job.previous else {}
    return before | {
        job.cache: max(0, need.cache - _present(job.cache)),
        job.output: max(0, need.output - _present(job.output / "checkpoints")),
    }


def _present(folder: Path) -> int:
    """Bytes of the files in a folder; a file with several names counts once."""
    sizes = {}
    for top, _, names in os.walk(folder):
        with suppress(OSError):  # one went away meanwhile
            sizes |= {os.stat(f"{top}/{name}").st_ino: os.stat(f"{top}/{name}").st_size for name in names}
    return sum(sizes.values())


def on_disk_of(folder: Path, files: dict[Path, int]) -> int:
    """Bytes of `files`, by folder, that go to the disk of `folder`."""
    return sum(nbytes for place, nbytes in files.items() if disk(place) == disk(folder))


def disk_demands(job: Job, machine: Machine, swapped: int) -> list[Demand]:
    """Bytes still to be written to each disk of this machine.

    Args:
        swapped: bytes that its ranks swap.
    """
    files, swap = to_come(job, accelerator=machine.device_free is not None), swap_folder(job)
    files[swap] = files.get(swap, 0) + swapped
    of_disks, demanded = {disk(folder): folder for folder in reversed(files)}, []
    for folder in of_disks.values():
        name = f"of the disk of {folder}" if len(of_disks) > 1 else "of disk"
        demanded.append(Demand(name, on_disk_of(folder, files), disk_free(folder), SYSTEM))
    return demanded


def fetch_problems(job: Job) -> list[str]:
    """Log on rank 0 what a run will fetch from the hub; list what keeps it from having it."""
    folder, cache = job.folder, Path(HF_HUB_CACHE)
    if collectives.rank() != 0 or not folder.revision:
        return []
    if not (nbytes := folder.bytes_to_fetch()):
        return []
    free, still = disk_free(cache), to_come(job, accelerator=on_accelerator())
    collectives.log0("fetch     %s of %s into %s, %s free", amount(nbytes), folder.name, cache, amount(free))
    if (need := nbytes + on_disk_of(cache, still)) <= free:
        return []
    return [
        f"The teacher from the hub, and what the run writes to the same disk, take {amount(need)}, and "
        f"{amount(free)} are free at {cache}. Set HF_HOME to a folder on a larger disk."
    ]


def log_disk_use(job: Job) -> None:
    """Log on rank 0 the files of the run and the free space of their disks."""
    if collectives.rank() != 0:
        return
    accelerator = on_accelerator()
    folders = {disk(folder): folder for folder in to_come(job, accelerator=accelerator)}.values()
    free = [f"{amount(disk_free(folder))} free at {folder}" for folder in folders]
    collectives.log0("disk      %s; %s", written(job, accelerator=accelerator), ", ".join(free))


TOO_MUCH = 1.2
"""Times the free memory that a plan, which is an estimate, may need for its run to be started."""
HELPS = (
    "What helps: `--deepspeed_config auto --teacher_deepspeed_config auto` take what fits, and `wandistiller "
    "plan` says what takes how much. `--despite_plan` starts the run nevertheless."
)


class Shortages(NamedTuple):
    """Lines for people."""

    far: list[str]
    """Memory of which the plan needs TOO_MUCH times what is free, or more."""
    of_memory: list[str]
    """Memory of which it needs more than is free, but less than that."""
    of_disk: list[str]


def shortages(stages: list[Job], *, preparing: bool = False) -> Shortages:
    """List on the first rank of each node each memory and disk of which a recipe's plan needs too much.

    Collective. The reserve that `plan` and `auto` leave is not counted: such a run may still succeed. A stage
    whose steps are done needs nothing.

    Args:
        preparing: the run ends when its cache is full.
    """
    lines, machine = Shortages([], [], []), this_machine(Path())
    if local_rank() != 0:
        return lines
    for job in stages:
        which = f"Stage {job.output.name}" if len(stages) > 1 else "The run"
        phases = plan(job, machine)
        if preparing:
            phases = {"prepare": phases["prepare"]}
        done = job.resume_from and read_state(job.resume_from)["step"] >= job.run.max_steps
        *memory, _ = demands([] if done else moments(phases), machine)
        # the last one's counts the files of all
        swapped = machine.ranks_on_node * most(phases).disk
        disks = disk_demands(job, machine, swapped) if job is stages[-1] else []
        for demand in (*memory, *disks):
            if demand.need > demand.free:
                line = f"{which} needs {demand} by its plan, and {amount(demand.free)} are free."
                far = demand.need >= TOO_MUCH * demand.free
                (lines.of_disk if demand in disks else lines.far if far else lines.of_memory).append(line)
    return lines
