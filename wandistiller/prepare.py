"""`wandistiller prepare`: fill the cache with encoded prompts and latents; `train` does the same for what is missing."""

import numpy as np
import torch

from wandistiller import distributed
from wandistiller.conditioning import TextCache, text_stamp
from wandistiller.data import CachedData, Samples, Selection
from wandistiller.deepspeed_json import dtype_name
from wandistiller.files import digest, fingerprint, write_json
from wandistiller.items import SHOWN, Kind
from wandistiller.job import Job
from wandistiller.latents import LatentCache, Sample
from wandistiller.media import Size, nearest_buckets, pixel_sizes
from wandistiller.objectives import Teacher
from wandistiller.phase import doing
from wandistiller.problems import ConfigError
from wandistiller.teacher import Guidance, build_teacher
from wandistiller.usage import within


@within("prepare")
def prepare(job: Job) -> tuple[CachedData, TextCache, Teacher | None]:
    """Complete the cache with what the run will use. Collective.

    Returns:
        The training data, the text by prompt, and the teacher if it was needed (it is kept, not loaded twice).

    Raises:
        ConfigError: on all ranks; media cannot be used, and the run is strict or nothing is left.
    """
    if any(other != job.identity for other in distributed.gather_objects(job.identity)):
        raise ConfigError("The ranks read different settings or data: a file changed while the run started, or the nodes do not "
                          "see the same files. Start again.")  # fmt: skip
    doing("reading the cache")
    device = distributed.device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    latents = LatentCache(
        job.cache, job.folder, job.rollouts, fps=job.run.video_fps, shard_size=job.run.prepare_batch,
        vae_stamp=fingerprint([job.folder.path / "vae"]), teacher_stamp=_teacher_stamp(job, text_stamp(job.folder.path, dtype)),
    )  # fmt: skip
    selection, samples = _select(job, latents, device)
    prompts = [s.item.prompt for s in samples.values()] + job.run.sample_prompts + [job.run.negative_prompt]
    text = TextCache(job.cache, job.folder.path, prompts, dtype)
    doing("encoding the prompts")
    text.fill(device)
    made = {latents.key(s): s for s in samples.values() if not s.item.media}
    teacher = None
    if latents.lacks_rollouts(made):
        teacher = guided_teacher(job, text)
        doing("the teacher's rollouts")
        latents.fill_rollouts(made, teacher.velocity, text.__getitem__, device)
    distributed.log0("cache     %s: the run uses %d samples", job.cache, len(samples))
    return CachedData(selection, samples, latents, text, device), text, teacher


def _select(job: Job, latents: LatentCache, device: torch.device) -> tuple[Selection, dict[int, Sample]]:
    """The samples that the run uses, their media encoded; others in the place of those that cannot be. Collective."""
    all_samples = Samples(job.items, job.run.rollouts_per_prompt, *_sizes(job))
    selection = Selection(all_samples, seed=job.run.seed, global_batch=job.batch.total, steps=job.run.max_steps)
    samples: dict[int, Sample] = {}
    skipped: dict[str, str] = {}
    new = selection.numbers
    while new:
        samples |= {n: all_samples[n] for n in new}
        key = {n: latents.key(samples[n]) for n in new if samples[n].item.media}
        unusable = latents.fill_media({k: samples[n] for n, k in key.items()}, device)
        if unusable and job.run.strict:
            raise ConfigError(*_told(sorted(unusable.values())))
        skipped |= unusable
        new = selection.replace(n for n, k in key.items() if k in unusable)
    if distributed.rank() == 0:
        _report(job, sorted(skipped.values()))
    return selection, {n: samples[n] for n in selection.used()}


def _report(job: Job, skipped: list[str]) -> None:
    """List what was skipped in a file, or take away the list of before."""
    file = job.output / "skipped.json"
    file.unlink(missing_ok=True)
    if skipped:
        write_json(file, skipped)
        distributed.log0("skipped   %d media that cannot be used, listed in %s", len(skipped), file)


def _told(problems: list[str]) -> list[str]:
    more = [f"{len(problems) - SHOWN} more cannot be used."] if len(problems) > SHOWN else []
    return problems[:SHOWN] + more + ["`strict` is true: mend these files or take them out; without it they are skipped."]


def _sizes(job: Job) -> tuple[list[Size], np.ndarray | None]:
    """The sizes that samples have, the run's first, and which of them each medium is cut to. Collective."""
    media = np.flatnonzero(job.items.kinds != Kind.PROMPT)
    if not job.buckets or not len(media):
        return [job.size], None
    shown = pixel_sizes(lambda i: job.items[int(media[i])].media, len(media), job.cache / "latents" / "sizes.safetensors")
    sizes = list(dict.fromkeys([job.size, *job.buckets]))
    nearest = nearest_buckets(shown, [(b.height, b.width) for b in job.buckets])
    return sizes, np.array([sizes.index(b) for b in job.buckets])[nearest]


def guided_teacher(job: Job, text: TextCache) -> Teacher:
    """The teacher as it will be asked: placed by its JSON, guidance folded in. Collective."""
    doing("loading the teacher")
    return build_teacher(job.folder, job.teacher_ds, Guidance(text[job.run.negative_prompt], job.guidance))


def _teacher_stamp(job: Job, of_text: str) -> str:
    r = job.run
    weights = fingerprint(job.folder.path / e.value for e in job.folder.configs)
    guidance = (r.guidance_scale, r.guidance_scale_2, r.negative_prompt)
    return digest(weights, of_text, guidance, dtype_name(job.teacher_ds))


def run(job: Job) -> None:
    """The command."""
    prepare(job)
    distributed.finish()
