"""`wandistiller prepare`: fill the cache with encoded prompts and latents, as `train` does if need be."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from wandistiller.config.identity import require_same
from wandistiller.config.job import Job
from wandistiller.data.buckets import media_dimensions, nearest_buckets
from wandistiller.data.cached_dataset import AllSamples, CachedData, SampleSelection
from wandistiller.data.conditions import Conditions
from wandistiller.data.dataset import SHOWN, MediaType, PromptItem
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.media import Size
from wandistiller.data.tensor_cache import Measured, Sample
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.experts import Expert
from wandistiller.monitoring.memory_usage import within
from wandistiller.teacher.base import Guidance, Teacher
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.teacher_json import quantized_facts
from wandistiller.utils.errors import ConfigError, Problem
from wandistiller.utils.files import digest, fingerprint, write_json
from wandistiller.utils.logging import set_activity

Skipped = dict[str, str]
"""Entry of skipped.json: file, reason and prompt."""
STRICT = "`strict` is true: fix these files or take them out; without it they are skipped."
SKIPPED = "skipped.json"
NAMED = 3
"""Greatest number of skipped media that are named in the log."""


def ranks_of(job: Job) -> Ranks:
    """Return the ranks of a run, which share sequences as it says. Collective.

    Raises:
        ConfigError: on all ranks; they did not all read the same run.
    """
    require_same([job])
    return Ranks.in_groups_of(job.run.context_parallel)


@within("prepare")
def prepare(job: Job, ranks: Ranks = ALONE) -> tuple[CachedData, Conditions, Teacher | None]:
    """Complete the cache for the run. Collective.

    Returns:
        The training data, conditioning by sample, and the teacher if it was loaded, so as not to load it
        twice.

    Raises:
        ConfigError: on all ranks; media cannot be used, and the run is strict or nothing is left.
    """
    set_activity("checking the VAE")
    with collectives.raise_on_all_ranks():
        if collectives.rank() == 0:  # pictures need it after hours
            job.folder.load_vae(torch.device("cpu"))
    set_activity("reading the cache")
    device, files = collectives.device(), job.run.prepare_batch
    conditions = Conditions(job.cache, job.folder, device, job.reader, files)
    teachers = _teacher_fingerprint(job, conditions.text.fingerprint)
    of_run = job.cache, job.folder, job.rollouts, device
    latents = LatentCache(*of_run, reader=job.reader, samples_per_file=files, teacher_fingerprint=teachers)
    selection, samples, skipped = _select(job, latents, conditions)
    sample_items = _sample_items(job, samples, skipped, conditions)
    items = [s.item for s in samples.values()] + sample_items
    set_activity("encoding the prompts")
    conditions.text.fill([item.prompt for item in items] + [job.run.negative_prompt])
    with_latents = _with_latents(job, selection, samples)
    made = {latents.key(s): s for n, s in samples.items() if n in with_latents and not s.item.media}
    teacher = None
    if latents.lacks_rollouts(made):
        teacher = guided_teacher(job, conditions, ranks)
        set_activity("the teacher's rollouts")
        latents.fill_rollouts(made, teacher.velocity, conditions.of, ranks)
    collectives.log0("cache     %s: the run uses %d samples", job.cache, len(samples))
    data = CachedData(
        selection,
        samples,
        latents,
        conditions,
        sample_items,
        measured=Measured(job.cache / "measured" / teachers),
        with_latents=with_latents,
    )
    return data, conditions, teacher


def _select(
    job: Job, latents: LatentCache, conditions: Conditions
) -> tuple[SampleSelection, dict[int, Sample], list[Skipped]]:
    """Select the run's samples, encode their media, and replace and list unreadable ones. Collective."""
    r = job.run
    all_samples = AllSamples(job.items, r.rollouts_per_prompt, *_sizes(job))
    selection = SampleSelection(
        all_samples, seed=job.run.seed, global_batch=job.batch.total, steps=job.updates
    )
    samples: dict[int, Sample] = {}
    skipped: dict[int, Skipped] = {}
    listed: list[Skipped] = []
    new = selection.numbers
    while new:
        samples |= {n: all_samples[n] for n in new}
        unusable = _encode({n: samples[n] for n in new}, job, latents, conditions)
        if unusable and job.run.strict:
            raise ConfigError(*_messages(sorted(set(unusable.values())), STRICT))
        skipped |= {n: _entry(samples[n].item, why) for n, why in unusable.items()}
        listed = sorted(skipped.values(), key=lambda entry: entry["file"])
        try:
            new = selection.replace(unusable)
        except ConfigError as error:
            _report(job, listed)
            why = [f"{entry['file']}: {entry['reason']}" for entry in listed]
            raise ConfigError(str(error), *_messages(why, f"All are in {job.output / SKIPPED}.")) from None
    _report(job, listed)
    return selection, {n: samples[n] for n in selection.used()}, listed


def _with_latents(job: Job, selection: SampleSelection, samples: dict[int, Sample]) -> set[int]:
    """Return the numbers of the samples that have latents: media, and those of updates that read them."""
    updates = job.updates_with_latents
    if not updates or len(updates) == job.updates:
        return set(samples) if updates else set()
    return selection.used_in(updates) | {n for n, s in samples.items() if s.item.media}


def _encode(
    samples: dict[int, Sample], job: Job, latents: LatentCache, conditions: Conditions
) -> dict[int, Problem]:
    """Encode the media of samples; return file and reason of those that cannot be used. Collective."""
    key = {n: latents.key(s) for n, s in samples.items() if s.item.media} if job.updates_with_latents else {}
    unusable = latents.fill_media({k: samples[n] for n, k in key.items()})
    problems = {n: unusable[k] for n, k in key.items() if k in unusable}
    usable = {n: s for n, s in samples.items() if n not in problems}
    without = conditions.fill_frames([*usable.values()])
    frames = {n: conditions.key(s).frames for n, s in usable.items()}
    return problems | {n: without[k] for n, k in frames.items() if k in without}


def _entry(item: PromptItem, problem: Problem) -> Skipped:
    return {"file": str(item.begins_with), "reason": problem.text, "prompt": item.prompt}


def _report(job: Job, skipped: list[Skipped]) -> None:
    """Write the list of skipped media and of files whose ending is not known, or remove an earlier one."""
    if collectives.rank() != 0:
        return
    file = job.output / SKIPPED
    file.unlink(missing_ok=True)
    unknown = Problem("its ending is not known; save it as .png, .jpg or .mp4.")
    listed = skipped + [_entry(PromptItem("", f), unknown) for f in job.items.unknown]
    if listed:
        write_json(file, listed)
        names = [Path(entry["file"]).name for entry in listed[:NAMED]] + ["..."] * (len(listed) > NAMED)
        text = "skipped   %d media that cannot be used: %s; see %s"
        collectives.log0(text, len(listed), ", ".join(names), file)


def _sample_items(
    job: Job, samples: dict[int, Sample], skipped: list[Skipped], conditions: Conditions
) -> list[PromptItem]:
    """Return what pictures are of; if picked from the data, without what was skipped there. Collective."""
    items, used = job.sample_items, list(dict.fromkeys(sample.item for sample in samples.values()))
    if job.folder.config.takes_image:
        drawn = [Sample(item, job.size) for item in items]
        unusable = conditions.fill_frames(drawn)
        return [s.item for s in drawn if conditions.key(s).frames not in unusable] or used[:8]
    if not skipped or [item.prompt for item in items] != [item.prompt for item in job.items.spread()]:
        return items
    out, left = {entry["prompt"] for entry in skipped}, list(dict.fromkeys(item.prompt for item in used))
    usable = [item for item in items if item.prompt not in out or item.prompt in left]
    return usable or [PromptItem(prompt) for prompt in left[:8]]


def _messages(problems: list[str], remedy: str) -> list[str]:
    beyond = [f"{len(problems) - SHOWN} more cannot be used."] if len(problems) > SHOWN else []
    return [*problems[:SHOWN], *beyond, remedy]


def _sizes(job: Job) -> tuple[list[Size], np.ndarray]:
    """Return the sizes of samples, the run's own first, and the index of each item's size. Collective."""
    size_of, media = np.zeros(len(job.items), int), np.flatnonzero(job.items.kinds != MediaType.PROMPT)
    if not job.buckets or not len(media):
        return [job.size], size_of
    table = job.cache / "latents" / "sizes.safetensors"
    dimensions_N2 = media_dimensions(lambda i: job.items[int(media[i])].begins_with, len(media), table)
    sizes = list(dict.fromkeys([job.size, *job.buckets]))
    nearest = nearest_buckets(dimensions_N2, [(b.height, b.width) for b in job.buckets])
    size_of[media] = np.array([sizes.index(b) for b in job.buckets])[nearest]
    return sizes, size_of


def guided_teacher(job: Job, conditions: Conditions, ranks: Ranks = ALONE) -> Teacher:
    """Load the run's teacher, placed by its JSON, with guidance. Collective."""
    set_activity("loading the teacher")
    scales = {Expert.HIGH_NOISE: job.run.guidance_scale, Expert.LOW_NOISE: job.run.guidance_scale_2}
    guidance = Guidance(conditions.text[job.run.negative_prompt], scales)
    folder, merges = job.folder.only(job.networks.teacher), job.run.merge_text_padding
    return build_teacher(folder, job.teacher, guidance, merges_padding=merges, ranks=ranks)


def _teacher_fingerprint(job: Job, text_fingerprint: str) -> str:
    r = job.run
    weights = fingerprint(job.folder.path / e.value for e in job.folder.configs)
    added = job.folder.added_identities  # nothing in caches of other teachers, as `quantized`
    guidance = (r.guidance_scale, r.guidance_scale_2, r.negative_prompt)
    quantized = quantized_facts(job.teacher).values()
    images = [fingerprint(job.folder.given_frames_parts)] if job.folder.config.takes_image else []
    # rollouts name their shift; a folder that is saved anew may have another version
    sampler = job.folder.boundary, job.folder.scheduler_config(1.0) | {"_diffusers_version": ""}
    parts = text_fingerprint, guidance, job.teacher.engine.precision, *quantized, *added, *images, sampler
    return digest(weights, *parts)


def run(stages: list[Job], begin: Callable[[Job], None]) -> None:
    """Run the command.

    Args:
        stages: a recipe's runs, which share a cache.
    """
    for job in (job for job in stages if not job.is_spent):
        begin(job)
        prepare(job, ranks_of(job))
    collectives.destroy()
