"""`wandistiller prepare`: fill the cache with encoded prompts and latents, as `train` does if need be."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.config.identity import identity
from wandistiller.config.job import Job
from wandistiller.data.buckets import media_dimensions, nearest_buckets
from wandistiller.data.cached_dataset import AllSamples, CachedData, SampleSelection
from wandistiller.data.dataset import SHOWN, MediaType, PromptItem
from wandistiller.data.latent_cache import LatentCache, Sample
from wandistiller.data.lines import caption
from wandistiller.data.measured import Measured
from wandistiller.data.media import Size
from wandistiller.data.text_cache import TextCache
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.evaluation.quantization_error import SAMPLES, in_words, quantization_error
from wandistiller.monitoring.memory_usage import within
from wandistiller.student.full_start import prepare_full_starts
from wandistiller.teacher.base import Guidance, Teacher, local_modules, without_guidance
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.teacher_json import quantized_facts
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest, fingerprint, write_json
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.utils.logging import set_activity
from wandistiller.wan.context_parallel import whole_sequences
from wandistiller.wan.loaded_components import load_vae
from wandistiller.wan.sampling import denoise

Skipped = dict[str, str]
"""Entry of skipped.json: file, reason and prompt."""
STEPS = 4
"""Sampling steps of the images on which the error of quantised weights is measured."""
NAMED = 3
"""Greatest number of skipped media that are named in the log."""


def ranks_of(job: Job) -> Ranks:
    """Return the ranks of a run, which share sequences as it says. Collective.

    Raises:
        ConfigError: on all ranks; they did not all read the same run.
    """
    own = identity(job)
    if any(other != own for other in collectives.gather_objects(own)):
        raise ConfigError(
            "The ranks read different settings or data: a file changed while the run started, or the nodes "
            "do not see the same files. Start again."
        )
    return Ranks.in_groups_of(job.run.context_parallel)


@within("prepare")
def prepare(job: Job, ranks: Ranks = ALONE) -> tuple[CachedData, TextCache, Teacher | None]:
    """Complete the cache for the run. Collective.

    Returns:
        The training data, the text by prompt, and the teacher if it was loaded, so as not to load it twice.

    Raises:
        ConfigError: on all ranks; media cannot be used, and the run is strict or nothing is left.
    """
    if ranks.degree != job.run.context_parallel:
        raise ValueError("ranks that share samples are made by `ranks_of`, once, and handed on")
    set_activity("checking the VAE")
    with collectives.raise_on_all_ranks():
        if collectives.rank() == 0:  # pictures need it after hours
            load_vae(job.folder.path / "vae")
    set_activity("reading the cache")
    device = collectives.device()
    text = TextCache(job.cache, job.folder.path, device)
    teachers = _teacher_fingerprint(job, text.fingerprint)
    latents = LatentCache(
        job.cache,
        job.folder,
        job.rollouts,
        device,
        fps=job.run.video_fps,
        samples_per_file=job.run.prepare_batch,
        background=job.background,
        fit=job.run.fit,
        clips=job.run.clips_per_video,
        teacher_fingerprint=teachers,
    )
    selection, samples, skipped = _select(job, latents)
    sample_prompts = _sample_prompts(job, samples, skipped)
    prompts = [s.item.prompt for s in samples.values()] + sample_prompts + [job.run.negative_prompt]
    set_activity("encoding the prompts")
    text.fill(prompts)
    made = {latents.key(s): s for s in samples.values() if not s.item.media} if job.needs_latents else {}
    prepare_full_starts(job)
    teacher = None
    if latents.lacks_rollouts(made):
        teacher = guided_teacher(job, text, sample_prompts, ranks)
        set_activity("the teacher's rollouts")
        latents.fill_rollouts(made, teacher.velocity, text.of, ranks)
    collectives.log0("cache     %s: the run uses %d samples", job.cache, len(samples))
    data = CachedData(
        selection,
        samples,
        latents,
        text,
        sample_prompts,
        measured=Measured(job.cache / "measured" / teachers),
        has_latents=job.needs_latents,
    )
    return data, text, teacher


def _select(job: Job, latents: LatentCache) -> tuple[SampleSelection, dict[int, Sample], list[Skipped]]:
    """Select the run's samples, encode their media, and replace and list unreadable ones. Collective."""
    r = job.run
    all_samples = AllSamples(job.items, r.rollouts_per_prompt, *_sizes(job), r.clips_per_video)
    selection = SampleSelection(
        all_samples, seed=job.run.seed, global_batch=job.batch.total, steps=job.updates
    )
    samples: dict[int, Sample] = {}
    skipped: dict[str, Skipped] = {}
    new = selection.numbers
    while new:
        samples |= {n: all_samples[n] for n in new}
        key = {n: latents.key(samples[n]) for n in new if samples[n].item.media} if job.needs_latents else {}
        unusable = latents.fill_media({k: samples[n] for n, k in key.items()})
        if unusable and job.run.strict:
            raise ConfigError(*_messages(sorted(set(unusable.values()))))  # the clips of a video have one
        skipped |= {k: _entry(samples[n].item, unusable[k]) for n, k in key.items() if k in unusable}
        new = selection.replace(n for n, k in key.items() if k in unusable)
    each = {tuple(entry.values()): entry for entry in skipped.values()}
    found = sorted(each.values(), key=lambda entry: entry["file"])
    if collectives.rank() == 0:
        _report(job, found)
    return selection, {n: samples[n] for n in selection.used()}, found


def _entry(item: PromptItem, problem: str) -> Skipped:
    return {
        "file": str(item.media),
        "reason": problem.removeprefix(f"{item.media}: "),
        "prompt": item.prompt,
    }


def _report(job: Job, skipped: list[Skipped]) -> None:
    """Write the list of skipped media and of files whose ending is not known, or remove an earlier one."""
    file = job.output / "skipped.json"
    file.unlink(missing_ok=True)
    unknown = "its ending is not known; save it as .png, .jpg or .mp4."
    listed = skipped + [_entry(PromptItem(caption(f), f), unknown) for f in job.items.unknown]
    if listed:
        write_json(file, listed)
        names = ", ".join(Path(entry["file"]).name for entry in listed[:NAMED])
        more = ", ..." if len(listed) > NAMED else ""
        collectives.log0(
            "skipped   %d media that cannot be used: %s%s; see %s", len(listed), names, more, file
        )


def _sample_prompts(job: Job, samples: dict[int, Sample], skipped: list[Skipped]) -> list[str]:
    """Return the prompts of pictures; those picked from the data are without captions of skipped media."""
    prompts = job.run.sample_prompts
    if not skipped or prompts != job.items.spread():
        return prompts
    out = {entry["prompt"] for entry in skipped}
    used = list(dict.fromkeys(sample.item.prompt for sample in samples.values()))
    return [p for p in prompts if p not in out or p in used] or used[:8]


def _messages(problems: list[str]) -> list[str]:
    more = [f"{len(problems) - SHOWN} more cannot be used."] if len(problems) > SHOWN else []
    remedy = "`strict` is true: fix these files or take them out; without it they are skipped."
    return [*problems[:SHOWN], *more, remedy]


def _sizes(job: Job) -> tuple[list[Size], np.ndarray]:
    """Return the sizes of samples, the run's own first, and the index of each medium's size. Collective."""
    media = np.flatnonzero(job.items.kinds != MediaType.PROMPT)
    if not job.buckets or not len(media):
        return [job.size], np.zeros(len(media))
    table = job.cache / "latents" / "sizes.safetensors"
    dimensions_N2 = media_dimensions(lambda i: job.items[int(media[i])].media, len(media), table)
    sizes = list(dict.fromkeys([job.size, *job.buckets]))
    nearest = nearest_buckets(dimensions_N2, [(b.height, b.width) for b in job.buckets])
    return sizes, np.array([sizes.index(b) for b in job.buckets])[nearest]


def guided_teacher(job: Job, text: TextCache, prompts: list[str], ranks: Ranks = ALONE) -> Teacher:
    """Load the run's teacher, placed by its JSON, with guidance. Collective.

    Args:
        prompts: of the run's pictures, on which the error of quantised weights is measured.
    """
    set_activity("loading the teacher")
    guidance = Guidance(text[job.run.negative_prompt], job.guidance)
    how = {"merges_padding": job.run.merge_text_padding, "ranks": ranks}
    teacher = build_teacher(job.teachers_folder, job.teacher, guidance, **how)
    if weights := job.teacher.weights:
        conditioning = text_of_images(job, text, prompts)
        with whole_sequences(local_modules(without_guidance(teacher)).values()):  # on single frames
            errors = _quantization_error(job, teacher, guidance, conditioning)
        collectives.log0("teacher   %s: relative velocity error %s", weights, in_words(errors))
    return teacher


def _quantization_error(
    job: Job, teacher: Teacher, guidance: Guidance, conditioning: Conditioning
) -> dict[str, float]:
    """Return the error that the teacher's quantised weights cost, on images that it draws. Collective."""
    x0_BCFHW = images_of(job, teacher.velocity, conditioning)
    given = job.teachers_folder, job.teacher, teacher, guidance, x0_BCFHW, conditioning, job.run.seed
    return quantization_error(*given, merges_padding=job.run.merge_text_padding)


def text_of_images(job: Job, text: TextCache, prompts: list[str]) -> Conditioning:
    """Return the conditioning of the images on which errors are measured, on this rank's device.

    Args:
        prompts: of the run's pictures.
    """
    return text.of(prompts[:SAMPLES] or [job.run.negative_prompt]).to(collectives.device())


def images_of(job: Job, velocity: Callable[[State], Tensor], conditioning: Conditioning) -> Tensor:
    """Return x0_BCFHW of single images that a network draws, on which errors are measured. Collective."""
    folder, r = job.teachers_folder, job.run
    shape = folder.latent_shape(r.height, r.width, 1)
    noise = [keyed_normal(shape, r.seed, "quantised", i) for i in range(len(conditioning.text_BLD))]
    noise_BCFHW = torch.stack(noise).to(collectives.device())
    return denoise(velocity, folder, r.shift, noise_BCFHW, conditioning, STEPS)[0]


def _teacher_fingerprint(job: Job, text_fingerprint: str) -> str:
    r = job.run
    weights = fingerprint(job.folder.path / e.value for e in job.folder.configs)
    added = job.folder.added_identities  # nothing in caches of other teachers, as `quantized`
    guidance = (r.guidance_scale, r.guidance_scale_2, r.negative_prompt)
    quantized = quantized_facts(job.teacher).values()
    return digest(weights, text_fingerprint, guidance, job.teacher.engine.precision, *quantized, *added)


def run(stages: list[Job], begin: Callable[[Job], None]) -> None:
    """Run the command.

    Args:
        stages: a recipe's runs, which share a cache.
        begin: called before each of them.
    """
    for job in (job for job in stages if not job.is_spent):
        begin(job)
        prepare(job, ranks_of(job))
    collectives.destroy()
