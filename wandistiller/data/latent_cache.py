"""Latent cache of images, videos and teacher rollouts."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import MediaError, Size, file_fingerprint, load_media
from wandistiller.data.tensor_cache import TensorCache
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.shutdown import stopping
from wandistiller.flow import keyed_normal
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import digest, read_json, write_json
from wandistiller.wan.encoders import Vae
from wandistiller.wan.pipeline import WanFolder
from wandistiller.wan.sampling import denoise


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


class LatentCache:
    """x0 of samples on disk, each under a key made of all that it depends on."""

    def __init__(
        self,
        cache: Path,
        folder: WanFolder,
        rollouts: Rollouts,
        *,
        fps: float,
        vae_fingerprint: str,
        teacher_fingerprint: str,
        samples_per_file: int,
    ):
        """Name the cache's folders; nothing is read or written yet.

        Args:
            fps: frames a second that videos are sampled at.
            vae_fingerprint: fingerprint of the VAE, for samples from media.
            teacher_fingerprint: fingerprint of teacher, guidance and text, for rollouts.
            samples_per_file: samples per file and per teacher call.
        """
        self.folder, self.rollouts = folder, rollouts
        self._fps, self._samples_per_file = fps, samples_per_file
        making = dataclasses.replace(rollouts, per_prompt=0)  # their number changes none of them
        self._made = TensorCache(cache / "latents" / digest(teacher_fingerprint, str(making)))
        self._media = TensorCache(cache / "latents" / digest(vae_fingerprint))
        self._unusable = cache / "latents" / "unusable.json"

    def key(self, sample: Sample) -> str:
        """Return the key of a sample."""
        item, size = sample.item, str(sample.size)
        if item.media:
            return digest(file_fingerprint(item.media), size, self._fps)
        return digest(item.prompt, sample.rollout_index, size)

    def __contains__(self, key: str) -> bool:
        return key in self._made or key in self._media

    def __getitem__(self, key: str) -> Tensor:
        """Return x0_CFHW, normalised, float32."""
        return (self._made if key in self._made else self._media).read(key, "x0")[0]

    def states(self, key: str) -> tuple[Tensor, Tensor]:
        """Return sigma_S and x_SCFHW of a rollout, float32: before each step, then x0 at sigma 0."""
        sigma_T, x_TCFHW, x0_CFHW = self._made.read(key, "sigma", "path", "x0")
        return torch.cat([sigma_T, sigma_T.new_zeros(1)]), torch.cat([x_TCFHW, x0_CFHW[None]])

    def fill_media(self, samples: dict[str, Sample], device: torch.device) -> dict[str, str]:
        """Encode images and videos, given by key, the files divided among the ranks. Collective.

        Returns:
            File and reason of each sample that cannot be used, by key; equal on all ranks, and stored.
        """
        known = collectives.broadcast_object(self._known_unusable())
        missing = self._media.missing_keys(key for key in samples if key not in known)
        files = []
        for size in dict.fromkeys(samples[key].size for key in missing):
            of_size = [key for key in missing if samples[key].size == size]
            files += [
                of_size[i : i + self._samples_per_file]
                for i in range(0, len(of_size), self._samples_per_file)
            ]
        own = files[collectives.rank() :: collectives.world_size()]
        own_unusable: dict[str, str] = {}
        with collectives.raise_on_all_ranks():
            if own:
                vae, progress = Vae(self.folder, device), Progress("latents from media", len(own))
            for keys in own:
                if stopping.reason:
                    break
                own_unusable |= self._encode({key: samples[key] for key in keys}, vae, device)
                progress.advance()
        collectives.raise_if_stop_requested("while encoding media; finished ones are kept")
        every_rank = collectives.gather_objects(own_unusable)
        unusable = {key: why for of_rank in every_rank for key, why in of_rank.items()}
        if unusable and collectives.rank() == 0:
            write_json(self._unusable, known | unusable)
        self._media.missing_keys(missing)
        return {key: why for key, why in (known | unusable).items() if key in samples}

    def _known_unusable(self) -> dict[str, str]:
        """File and reason by key, from earlier runs; empty if that file is damaged."""
        try:
            return read_json(self._unusable) if self._unusable.is_file() else {}
        except ConfigError as error:
            collectives.log0("cache     damaged and made anew: %s", error)
            return {}

    def _encode(self, samples: dict[str, Sample], vae: Vae, device: torch.device) -> dict[str, str]:
        """Write one file of samples of one size; return the reason, by key, for those that cannot be used.

        They are encoded one by one, as a video alone takes gigabytes.
        """
        tensors, unusable = {}, {}
        for key, sample in samples.items():
            try:
                pixels_CFHW = load_media(sample.item.media, sample.size, self._fps)
            except MediaError as error:
                unusable[key] = f"{sample.item.media}: {error}."
            else:
                tensors[key] = {"x0": vae.encode(pixels_CFHW[None].to(device))[0].float()}
        if tensors:
            self._media.write(tensors, {key: str(samples[key].item.media) for key in tensors})
        return unusable

    def lacks_rollouts(self, samples: dict[str, Sample]) -> bool:
        """Return whether any of these samples, given by key, needs the teacher. Collective."""
        return bool(self._made.missing_keys(samples))

    def fill_rollouts(
        self,
        samples: dict[str, Sample],
        velocity: Callable[[Batch], Tensor],
        text: Callable[[str], Tensor],
        device: torch.device,
    ) -> None:
        """Sample with the teacher. Collective: every rank makes the same number of teacher calls."""
        missing, world = self._made.missing_keys(samples), collectives.world_size()
        files = [
            missing[i : i + self._samples_per_file] for i in range(0, len(missing), self._samples_per_file)
        ]
        rounds = -(-len(files) // world)
        progress = Progress("latents from the teacher", rounds)
        for i in range(rounds):
            collectives.raise_if_stop_requested("while the teacher was sampling; finished samples are kept")
            turn = i * world + collectives.rank()
            # a rank without work repeats the last file: collectives must match
            keys = files[min(turn, len(files) - 1)]
            tensors = self._roll_out({key: samples[key] for key in keys}, velocity, text, device)
            if turn < len(files):
                self._made.write(tensors, {key: samples[key].item.prompt for key in keys})
            progress.advance()
        collectives.barrier()
        self._made.missing_keys(missing)

    def _roll_out(
        self,
        samples: dict[str, Sample],
        velocity: Callable[[Batch], Tensor],
        text: Callable[[str], Tensor],
        device: torch.device,
    ) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to store for samples of one size."""
        r, size = self.rollouts, next(iter(samples.values())).size
        shape = self.folder.latent_shape(size.height, size.width, size.num_frames)
        rows = [(s.item.prompt, s.rollout_index) for s in samples.values()]
        noise_BCFHW = torch.stack([keyed_normal(shape, r.seed, "rollout", *row) for row in rows]).to(device)
        text_BLD = torch.stack([text(prompt) for prompt, _ in rows]).to(device)
        x0_BCFHW, path = denoise(velocity, self.folder, r.shift, noise_BCFHW, text_BLD, r.steps)
        tensors = {key: {"x0": x0_CFHW.float()} for key, x0_CFHW in zip(samples, x0_BCFHW, strict=True)}
        if r.keep_path:
            for i, named in enumerate(tensors.values()):
                named["sigma"] = torch.tensor([sigma for sigma, _ in path])
                named["path"] = torch.stack([x_t_BCFHW[i].float() for _, x_t_BCFHW in path])
        return tensors
