"""Latent cache of images, videos and teacher rollouts."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.data.colours import RGB, WHITE
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import CROP, MediaError, Size, load_media, pixels_depend_on
from wandistiller.data.tensor_cache import TensorCache
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import (
    batched,
    number_of_rounds,
    own_batches,
    round_robin,
    until_stopped,
)
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest, file_fingerprint, fingerprint, read_json, write_json
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.loaded_components import Vae
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.sampling import denoise

Velocity = Callable[[State], Tensor]
"""The teacher's v_BCFHW."""
ConditioningOf = Callable[[list[str]], Conditioning]
"""The conditioning of prompts."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Settings of the teacher's rollouts for prompts without media."""

    steps: int
    per_prompt: int
    keep_path: bool
    seed: int
    shift: float


@dataclass(frozen=True, slots=True)
class Sample:
    """A training sample: an item at a size. For a prompt without media, one of the teacher's rollouts."""

    item: PromptItem
    size: Size
    rollout_index: int = 0
    clip: int = 0
    """Number of the clip, of a video."""


class LatentCache:
    """x0 of samples on disk, each under a key made of all that it depends on."""

    def __init__(
        self,
        cache: Path,
        folder: WanFolder,
        rollouts: Rollouts,
        device: torch.device,
        *,
        fps: float,
        teacher_fingerprint: str,
        samples_per_file: int,
        background: RGB = WHITE,
        fit: str = CROP,
        clips: int = 1,
    ):
        """Name the cache's folders; nothing is read or written yet.

        Args:
            device: where VAE and teacher compute.
            fps: frames a second that videos are read at.
            teacher_fingerprint: fingerprint of teacher, guidance and text, for rollouts.
            samples_per_file: samples per file and per teacher call.
            background: colour below transparent parts of media, and of bars.
            fit: `crop` or `letterbox`.
            clips: clips of each video.
        """
        self.device = device
        self._folder, self._rollouts = folder, rollouts
        self._fps, self._samples_per_file, self._background = fps, samples_per_file, background
        self._fit, self._clips = fit, clips
        making = dataclasses.replace(rollouts, per_prompt=0)  # their number changes none of them
        form = ["a tensor for each state"] * rollouts.keep_path  # of the files, else older ones would be read
        self._made = TensorCache(cache / "latents" / digest(teacher_fingerprint, str(making), *form))
        self._media = TensorCache(cache / "latents" / digest(fingerprint([folder.path / "vae"])))
        self._unusable = cache / "latents" / "unusable.json"

    def key(self, sample: Sample) -> str:
        """Return the key of a sample."""
        item, size = sample.item, str(sample.size)
        if item.media:
            more = pixels_depend_on(item.media, self._background, self._fit)
            if sample.clip:  # the first is that of a run of one clip
                more.append(f"clip {sample.clip} of {self._clips}")
            return digest(file_fingerprint(item.media), size, self._fps, *more)
        return digest(item.prompt, sample.rollout_index, size)

    def __contains__(self, key: str) -> bool:
        return key in self._made or key in self._media

    def __getitem__(self, key: str) -> Tensor:
        """Return x0_CFHW, normalised, float32."""
        return (self._made if key in self._made else self._media).read(key, "x0")[0]

    def levels(self, key: str) -> Tensor:
        """Return sigma_S of a rollout's states, float32: before each step, then x0 at sigma 0."""
        sigma_T = self._made.read(key, "sigma")[0]
        return torch.cat([sigma_T, sigma_T.new_zeros(1)])

    def state(self, key: str, number: int) -> Tensor:
        """Return x_CFHW of one of a rollout's states, float32: the first is the noise, the last is x0."""
        is_last = number == len(self._made.read(key, "sigma")[0])
        return self._made.read(key, "x0" if is_last else f"state {number}")[0]

    def fill_media(self, samples: dict[str, Sample]) -> dict[str, str]:
        """Encode images and videos, given by key, the files divided among the ranks. Collective.

        Returns:
            File and reason of each sample that cannot be used, by key; equal on all ranks, and stored.
        """
        known = collectives.broadcast_object(self._known_unusable())
        missing = self._media.missing_keys(key for key in samples if key not in known)
        by_size: dict[Size, list[str]] = {}
        for key in missing:
            by_size.setdefault(samples[key].size, []).append(key)
        files = own_batches([f for keys in by_size.values() for f in batched(keys, self._samples_per_file)])
        unusable: dict[str, str] = {}
        with collectives.raise_on_all_ranks():
            if files:
                vae = Vae(self._folder, self.device)
                progress = Progress("latents from media", sum(map(len, files)), "sample")
                for keys in until_stopped(files):
                    unusable |= self._encode({key: samples[key] for key in keys}, vae, progress)
        collectives.raise_if_stop_requested("while encoding media; finished ones are kept")
        new = {key: why for of_rank in collectives.gather_objects(unusable) for key, why in of_rank.items()}
        if new and collectives.rank() == 0:
            write_json(self._unusable, known | new)
        self._media.missing_keys(missing)
        return {key: why for key, why in (known | new).items() if key in samples}

    def _known_unusable(self) -> dict[str, str]:
        """File and reason by key, from earlier runs; empty if that file is damaged."""
        try:
            return read_json(self._unusable) if self._unusable.is_file() else {}
        except ConfigError as error:
            collectives.log0("cache     damaged and made anew: %s", error)
            return {}

    def _encode(self, samples: dict[str, Sample], vae: Vae, progress: Progress) -> dict[str, str]:
        """Write one file of samples of one size; return the reason, by key, for those that cannot be used.

        They are encoded one by one, as a video alone takes gigabytes.
        """
        tensors, unusable = {}, {}
        for key, sample in until_stopped(samples.items()):
            try:
                given = sample.item.media, sample.size, self._fps, self._background
                pixels_CFHW = load_media(*given, fit=self._fit, clip=sample.clip, clips=self._clips)
            except MediaError as error:
                unusable[key] = f"{sample.item.media}: {error}."
            else:
                tensors[key] = {"x0": vae.encode(pixels_CFHW[None].to(self.device))[0].float()}
            progress.advance()
        if tensors:
            self._media.write(tensors, {key: str(samples[key].item.media) for key in tensors})
        return unusable

    def lacks_rollouts(self, samples: dict[str, Sample]) -> bool:
        """Return whether any of these samples, given by key, needs the teacher. Collective."""
        return bool(self._made.missing_keys(samples))

    def fill_rollouts(
        self,
        samples: dict[str, Sample],
        velocity: Velocity,
        text: ConditioningOf,
        ranks: Ranks = ALONE,
    ) -> None:
        """Roll the teacher out. Collective: every rank makes the same number of teacher calls."""
        missing = self._made.missing_keys(samples)
        files = batched(missing, self._samples_per_file)
        name, calls = "latents from the teacher", number_of_rounds(files, ranks) * self._rollouts.steps
        progress = Progress(name, calls, "call")
        for _, keys, counts in round_robin(files, ranks):
            tensors = self._roll_out({key: samples[key] for key in keys}, progress.counting(velocity), text)
            if counts:
                self._made.write(tensors, {key: samples[key].item.prompt for key in keys})
        collectives.barrier()
        self._made.missing_keys(missing)

    def _roll_out(
        self, samples: dict[str, Sample], velocity: Velocity, text: ConditioningOf
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to store for samples of one size."""
        r, device, size = self._rollouts, self.device, next(iter(samples.values())).size
        shape = self._folder.latent_shape(size.height, size.width, size.num_frames)
        rows = [(s.item.prompt, s.rollout_index) for s in samples.values()]
        noise_BCFHW = torch.stack([keyed_normal(shape, r.seed, "rollout", *row) for row in rows]).to(device)
        conditioning = text([prompt for prompt, _ in rows]).to(device)
        x0_BCFHW, path = denoise(velocity, self._folder, r.shift, noise_BCFHW, conditioning, r.steps)
        tensors = {key: {"x0": x0_CFHW.float()} for key, x0_CFHW in zip(samples, x0_BCFHW, strict=True)}
        if r.keep_path:
            for i, named in enumerate(tensors.values()):
                named["sigma"] = torch.tensor([sigma for sigma, _ in path])
                named |= {f"state {s}": x_t_BCFHW[i].float() for s, (_, x_t_BCFHW) in enumerate(path)}
        return tensors
