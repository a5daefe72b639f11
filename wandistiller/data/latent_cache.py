"""Latent cache of images, videos and teacher rollouts."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.data.media import MediaReader
from wandistiller.data.tensor_cache import Encode, MediaCache, Sample, TensorCache, of_one_size
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import number_of_rounds, round_robin
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.network.folder import Folder
from wandistiller.network.sampling import denoise
from wandistiller.utils.errors import Problem
from wandistiller.utils.files import digest, fingerprint
from wandistiller.utils.keyed_random import keyed_normal

Velocity = Callable[[State], Tensor]
"""The teacher's v_BCFHW."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Settings of the teacher's rollouts for prompts without media."""

    steps: int
    per_prompt: int
    keep_path: bool
    seed: int
    shift: float

    @property
    def making(self) -> Self:
        """The settings that each rollout depends on: their number changes none of them."""
        return dataclasses.replace(self, per_prompt=0)


class LatentCache:
    """x0 of samples on disk, each under a key made of all that it depends on."""

    def __init__(
        self,
        cache: Path,
        folder: Folder,
        rollouts: Rollouts,
        device: torch.device,
        *,
        reader: MediaReader,
        teacher_fingerprint: str,
        samples_per_file: int,
    ):
        """Name the cache's folders; nothing is read or written yet.

        Args:
            teacher_fingerprint: fingerprint of teacher, guidance and text, for rollouts.
            samples_per_file: samples per file and per teacher call.
        """
        self.device = device
        self._folder, self._rollouts = folder, rollouts
        self._reader, self._samples_per_file = reader, samples_per_file
        form = ["a tensor for each state"] * rollouts.keep_path  # of the files, else older ones would be read
        self._made = TensorCache(cache / "latents" / digest(teacher_fingerprint, str(rollouts.making), *form))
        of_media = cache / "latents" / digest(fingerprint(folder.parts["vae"]))
        self._media = MediaCache(of_media, cache / "latents" / "reasons.json", samples_per_file)

    def key(self, sample: Sample) -> str:
        item, size = sample.item, str(sample.size)
        if item.media:
            return self._reader.key(item.media, sample.size)
        images = [self._reader.key(image, sample.size) for image in item.images]
        return digest(item.prompt, sample.rollout_index, size, *images)

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

    def fill_media(self, samples: dict[str, Sample]) -> dict[str, Problem]:
        """Encode images and videos, given by key; return as `MediaCache.fill` does. Collective."""

        def encoder() -> Encode:
            vae = self._folder.load_vae(self.device)

            def encode(sample: Sample) -> dict[str, Tensor]:
                pixels_CFHW = self._reader.read(sample.item.media, sample.size)
                return {"x0": vae.encode(pixels_CFHW[None].to(self.device))[0].float()}

            return encode

        return self._media.fill(samples, attrgetter("item.media"), encoder, "latents from media")

    def lacks_rollouts(self, samples: dict[str, Sample]) -> bool:
        """Return whether any of these samples, given by key, needs the teacher. Collective."""
        return bool(self._made.missing_keys(samples))

    def fill_rollouts(
        self,
        samples: dict[str, Sample],
        velocity: Velocity,
        conditioning: Callable[[list[Sample]], Conditioning],
        ranks: Ranks = ALONE,
    ) -> None:
        """Roll the teacher out. Collective: every rank makes the same number of teacher calls."""
        missing = self._made.missing_keys(samples)
        files = of_one_size(missing, samples, self._samples_per_file)
        name, calls = "latents from the teacher", number_of_rounds(files, ranks) * self._rollouts.steps
        progress = Progress(name, calls, "call")
        for _, keys, counts in round_robin(files, ranks):
            together = [samples[key] for key in keys]
            texts = conditioning(together).to(self.device)
            tensors = self._roll_out(together, progress.counting(velocity), texts)
            if counts:
                about = {key: samples[key].item.prompt for key in keys}
                self._made.write(dict(zip(keys, tensors, strict=True)), about)
        collectives.barrier()
        self._made.find_written(missing)

    def _roll_out(
        self, samples: list[Sample], velocity: Velocity, conditioning: Conditioning
    ) -> list[dict[str, Tensor]]:
        r, device, size = self._rollouts, self.device, samples[0].size
        shape = self._folder.latent_shape(size.height, size.width, size.num_frames)
        keys = [(r.seed, "rollout", *s.item.key, s.rollout_index) for s in samples]
        noise_BCFHW = torch.stack([keyed_normal(shape, *key) for key in keys]).to(device)
        x0_BCFHW, path = denoise(velocity, self._folder, r.shift, noise_BCFHW, conditioning, r.steps)
        tensors = [{"x0": x0_CFHW.float()} for x0_CFHW in x0_BCFHW]
        if r.keep_path:
            for i, named in enumerate(tensors):
                named["sigma"] = torch.tensor([sigma for sigma, _ in path])
                named |= {f"state {s}": x_t_BCFHW[i].float() for s, (_, x_t_BCFHW) in enumerate(path)}
        return tensors
