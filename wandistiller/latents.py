"""Images, videos or teacher rollouts -> latent cache; and the one sampling loop, used for rollouts and for pictures."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from diffusers import AutoencoderKLWan, SchedulerMixin
from torch import Tensor

from wandistiller import distributed
from wandistiller.batch import Batch
from wandistiller.config import read_json
from wandistiller.files import digest, write_json
from wandistiller.items import Item
from wandistiller.media import MediaError, Size, load_media, stamp
from wandistiller.metrics import Progress
from wandistiller.noise import TRAIN_TIMESTEPS, expert_at, keyed_normal
from wandistiller.problems import ConfigError
from wandistiller.shards import Shards
from wandistiller.stopping import stopping
from wandistiller.wan import WanFolder


class Vae:
    """AutoencoderKLWan with its latents normalised; float32, as Wan's needs. Drop the object to free the memory."""

    def __init__(self, folder: WanFolder, device: torch.device):
        self._vae = AutoencoderKLWan.from_pretrained(folder.path / "vae", dtype=torch.float32).eval().to(device)
        self._where = folder.path / "vae"
        self._mean_C111 = torch.tensor(folder.vae["latents_mean"], device=device).view(-1, 1, 1, 1)
        self._std_C111 = torch.tensor(folder.vae["latents_std"], device=device).view(-1, 1, 1, 1)

    @torch.no_grad()
    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Pixels in [-1, 1] -> normalised latents x0_BCFHW: (z - latents_mean) / latents_std, z the posterior's mode."""
        z_BCFHW = encoded(self._vae, pixels_BCFHW)
        if not z_BCFHW.isfinite().all():
            raise ConfigError(f"{self._where}: its answers are not finite. Fetch its weights again.")
        return (z_BCFHW - self._mean_C111) / self._std_C111

    @torch.no_grad()
    def decode(self, x0_BCFHW: Tensor) -> Tensor:
        """Normalised latents -> pixels_BCFHW in [0, 1]."""
        return decoded(self._vae, x0_BCFHW * self._std_C111 + self._mean_C111)


def encoded(vae: AutoencoderKLWan, pixels_BCFHW: Tensor) -> Tensor:
    """Pixels in [-1, 1] -> the posterior's mode z_BCFHW."""
    return vae.encode(pixels_BCFHW).latent_dist.mode()


def decoded(vae: AutoencoderKLWan, z_BCFHW: Tensor) -> Tensor:
    """z_BCFHW -> pixels_BCFHW in [0, 1]."""
    return (vae.decode(z_BCFHW).sample / 2 + 0.5).clamp(0, 1)


def _scheduler(folder: WanFolder, shift: float, steps: int, device: torch.device | None = None) -> SchedulerMixin:
    """The pipeline's own, set to `steps`."""
    name = diffusers.UniPCMultistepScheduler.load_config(folder.path / "scheduler")["_class_name"]
    kind = getattr(diffusers, name)
    key = "shift" if "shift" in kind.load_config(folder.path / "scheduler") else "flow_shift"
    scheduler = kind.from_pretrained(folder.path / "scheduler", **{key: shift})
    scheduler.set_timesteps(steps, device=device)
    return scheduler


def path_sigmas(folder: WanFolder, shift: float, steps: int) -> list[float]:
    """sigma of the states of a rollout's path, falling from about 1 to 0: before each of its steps, then of x0."""
    return _scheduler(folder, shift, steps).sigmas.tolist()


def denoise(
    velocity: Callable[[Batch], Tensor], folder: WanFolder, shift: float, noise_BCFHW: Tensor, text_BLD: Tensor, steps: int
) -> tuple[Tensor, list[tuple[float, Tensor]]]:
    """Sample with the pipeline's own scheduler. All ranks must call it with the same number of steps.

    Args:
        velocity: a teacher's or student's answer to a Batch, v_BCFHW.
        noise_BCFHW: the starting point, standard normal.
    Returns:
        x0_BCFHW, and the path to it: (sigma, x_t_BCFHW) before each step.
    """
    scheduler = _scheduler(folder, shift, steps, noise_BCFHW.device)
    x_t_BCFHW, states = noise_BCFHW, []
    # UniPC asks the network at whole timesteps but steps between the sigmas themselves (diffusers 0.42.1)
    for t, exact in zip(scheduler.timesteps, scheduler.sigmas.tolist(), strict=False):
        sigma = t.item() / TRAIN_TIMESTEPS
        sigma_B = torch.full((len(noise_BCFHW),), sigma, device=noise_BCFHW.device)
        states.append((exact, x_t_BCFHW))
        batch = Batch(x_t_BCFHW, noise_BCFHW, x_t_BCFHW, sigma_B, text_BLD, expert_at(sigma, folder.boundary))
        with torch.no_grad():
            x_t_BCFHW = scheduler.step(velocity(batch), t, x_t_BCFHW, return_dict=False)[0]
    return x_t_BCFHW, states


@dataclass(frozen=True, slots=True)
class Rollouts:
    """How the teacher makes latents for prompts without media."""

    steps: int
    per_prompt: int
    keep_path: bool
    seed: int
    shift: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What is trained on: an item at a size; of a prompt without media, the teacher's rollout number `take`."""

    item: Item
    size: Size
    take: int = 0


class LatentCache:
    """x0 of samples on disk, each under a key that says all it depends on."""

    def __init__(
        self, cache: Path, folder: WanFolder, rollouts: Rollouts, *, fps: float, vae_stamp: str, teacher_stamp: str,
        shard_size: int,
    ):  # fmt: skip
        """Nothing is read or written yet.

        Args:
            fps: frames a second that videos are sampled at.
            vae_stamp: stands for the VAE; for samples from media.
            teacher_stamp: stands for teacher, guidance and text; for rollouts.
            shard_size: samples per file, which is also the batch of one VAE or teacher call.
        """
        self.folder, self.rollouts = folder, rollouts
        self._fps, self._shard_size = fps, shard_size
        making = dataclasses.replace(rollouts, per_prompt=0)  # how many are made changes none of them
        self._made = Shards(cache / "latents" / digest(teacher_stamp, str(making)))
        self._media = Shards(cache / "latents" / digest(vae_stamp))
        self._unusable = cache / "latents" / "unusable.json"

    def key(self, sample: Sample) -> str:
        """What a sample is stored under."""
        item, size = sample.item, str(sample.size)
        return digest(stamp(item.media), size, self._fps) if item.media else digest(item.prompt, sample.take, size)

    def __contains__(self, key: str) -> bool:
        return key in self._made or key in self._media

    def __getitem__(self, key: str) -> Tensor:
        """x0_CFHW, normalised, float32."""
        return (self._made if key in self._made else self._media).read(key, "x0")[0]

    def states(self, key: str) -> tuple[Tensor, Tensor]:
        """sigma_S and x_SCFHW of a rollout, float32: the states before each of the teacher's steps, then x0 at sigma 0."""
        sigma_T, x_TCFHW, x0_CFHW = self._made.read(key, "sigma", "path", "x0")
        return torch.cat([sigma_T, sigma_T.new_zeros(1)]), torch.cat([x_TCFHW, x0_CFHW[None]])

    def fill_media(self, samples: dict[str, Sample], device: torch.device) -> dict[str, str]:
        """Encode images and videos, by key, the files split over the ranks. Collective.

        Returns:
            key -> file and reason of each sample that cannot be used; the same on all ranks, and remembered.
        """
        known = distributed.from_rank_0(self._known_unusable())
        missing = self._media.find(key for key in samples if key not in known)
        files = []
        for size in dict.fromkeys(samples[key].size for key in missing):
            of_size = [key for key in missing if samples[key].size == size]
            files += [of_size[i : i + self._shard_size] for i in range(0, len(of_size), self._shard_size)]
        mine = files[distributed.rank() :: distributed.world_size()]
        found: dict[str, str] = {}
        with distributed.same_problems():
            if mine:
                vae, progress = Vae(self.folder, device), Progress("latents from media", len(mine))
            for keys in mine:
                if stopping.reason:
                    break
                found |= self._encode({key: samples[key] for key in keys}, vae, device)
                progress.advance()
        distributed.stop_if_asked("while encoding media; those that are done are kept")
        unusable = {key: why for theirs in distributed.gather_objects(found) for key, why in theirs.items()}
        if unusable and distributed.rank() == 0:
            write_json(self._unusable, known | unusable)
        self._media.find(missing)
        return {key: why for key, why in (known | unusable).items() if key in samples}

    def _known_unusable(self) -> dict[str, str]:
        """Key -> file and reason, as runs before this one found; nothing, of a file that is damaged."""
        try:
            return read_json(self._unusable) if self._unusable.is_file() else {}
        except ConfigError as error:
            distributed.log0("cache     damaged and made anew: %s", error)
            return {}

    def _encode(self, samples: dict[str, Sample], vae: Vae, device: torch.device) -> dict[str, str]:
        """Write one file of samples of one size; returns what is wrong with those that cannot be used.

        They are encoded one by one: of a video that alone takes gigabytes.
        """
        tensors, wrong = {}, {}
        for key, sample in samples.items():
            try:
                pixels_CFHW = load_media(sample.item.media, sample.size, self._fps)
            except MediaError as error:
                wrong[key] = f"{sample.item.media}: {error}."
            else:
                tensors[key] = {"x0": vae.encode(pixels_CFHW[None].to(device))[0].float()}
        if tensors:
            self._media.write(tensors, {key: str(samples[key].item.media) for key in tensors})
        return wrong

    def lacks_rollouts(self, samples: dict[str, Sample]) -> bool:
        """Whether the teacher is needed for any of these samples, given by key. Collective."""
        return bool(self._made.find(samples))

    def fill_rollouts(
        self, samples: dict[str, Sample], velocity: Callable[[Batch], Tensor], text: Callable[[str], Tensor],
        device: torch.device,
    ) -> None:  # fmt: skip
        """Sample with the teacher. Collective: every rank makes the same number of teacher calls."""
        missing, world = self._made.find(samples), distributed.world_size()
        files = [missing[i : i + self._shard_size] for i in range(0, len(missing), self._shard_size)]
        rounds = -(-len(files) // world)
        progress = Progress("latents from the teacher", rounds)
        for i in range(rounds):
            distributed.stop_if_asked("while the teacher was sampling; what it made is kept")
            turn = i * world + distributed.rank()
            keys = files[min(turn, len(files) - 1)]  # a rank without work repeats the last: collectives must match
            tensors = self._roll_out({key: samples[key] for key in keys}, velocity, text, device)
            if turn < len(files):
                self._made.write(tensors, {key: samples[key].item.prompt for key in keys})
            progress.advance()
        distributed.barrier()
        self._made.find(missing)

    def _roll_out(
        self, samples: dict[str, Sample], velocity: Callable[[Batch], Tensor], text: Callable[[str], Tensor],
        device: torch.device,
    ) -> dict[str, dict[str, Tensor]]:  # fmt: skip
        """The tensors to store for samples of one size."""
        r, size = self.rollouts, next(iter(samples.values())).size
        shape = self.folder.latent_shape(size.height, size.width, size.num_frames)
        noise = [keyed_normal(shape, r.seed, "rollout", s.item.prompt, s.take) for s in samples.values()]
        text_BLD = torch.stack([text(s.item.prompt) for s in samples.values()]).to(device)
        x0_BCFHW, path = denoise(velocity, self.folder, r.shift, torch.stack(noise).to(device), text_BLD, r.steps)
        tensors = {key: {"x0": x0_CFHW.float()} for key, x0_CFHW in zip(samples, x0_BCFHW, strict=True)}
        if r.keep_path:
            for i, named in enumerate(tensors.values()):
                named["sigma"] = torch.tensor([sigma for sigma, _ in path])
                named["path"] = torch.stack([x_t_BCFHW[i].float() for _, x_t_BCFHW in path])
        return tensors
