"""`wandistiller prepare`: fill the cache with encoded prompts and latents; `train` does the same for what is missing."""

import torch

from wandistiller import distributed
from wandistiller.conditioning import TextCache
from wandistiller.data import CachedData
from wandistiller.deepspeed_json import dtype_name
from wandistiller.files import digest, fingerprint
from wandistiller.job import Job
from wandistiller.latents import LatentCache
from wandistiller.objectives import Teacher
from wandistiller.teacher import Guidance, build_teacher


def prepare(job: Job) -> tuple[CachedData, TextCache, Teacher | None]:
    """Complete the cache. Collective.

    Returns:
        The training data, the text by prompt, and the teacher if it was needed (it is kept, not loaded twice).
    """
    device = distributed.device()
    prompts = [i.prompt for i in job.items] + job.run.sample_prompts + [job.run.negative_prompt]
    text = TextCache(job.cache, job.folder.path, prompts, torch.float32 if device.type == "cpu" else torch.bfloat16)
    text.fill(device)
    latents = LatentCache(
        job.cache, job.folder, job.items, job.size, job.rollouts, shard_size=job.run.prepare_batch,
        vae_stamp=fingerprint([job.folder.path / "vae"]), teacher_stamp=_teacher_stamp(job, text),
    )  # fmt: skip
    latents.fill_media(device)
    teacher = None
    if latents.lacks_rollouts():
        teacher = guided_teacher(job, text)
        latents.fill_rollouts(teacher.velocity, text.__getitem__, device)
    latents.write_manifest()
    data = CachedData(latents, text, seed=job.run.seed, global_batch=job.batch.total, device=device)
    distributed.log0("cache     %s: %d samples", job.cache, len(data))
    return data, text, teacher


def guided_teacher(job: Job, text: TextCache) -> Teacher:
    """The teacher as it will be asked: placed by its JSON, guidance folded in. Collective."""
    return build_teacher(job.folder, job.teacher_ds, Guidance(text[job.run.negative_prompt], job.guidance))


def _teacher_stamp(job: Job, text: TextCache) -> str:
    r = job.run
    weights = fingerprint(job.folder.path / e.value for e in job.folder.configs)
    guidance = (r.guidance_scale, r.guidance_scale_2, r.negative_prompt)
    return digest(weights, text.stamp, guidance, dtype_name(job.teacher_ds))


def run(job: Job) -> None:
    """The command."""
    prepare(job)
    distributed.finish()
