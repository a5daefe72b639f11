"""Images, videos or teacher rollouts -> latent cache; and the one sampling loop, used for rollouts and for pictures."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.utils import load_video
from PIL import Image, ImageOps
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller import distributed
from wandistiller.batch import Batch
from wandistiller.conditioning import VIDEOS, Item
from wandistiller.config import ConfigError
from wandistiller.files import atomic, digest, write_json
from wandistiller.metrics import Progress
from wandistiller.noise import TRAIN_TIMESTEPS, expert_at, keyed_normal
from wandistiller.wan import WanFolder


class Vae:
    """AutoencoderKLWan with its latents normalised; float32, as Wan's needs. Drop the object to free the memory."""

    def __init__(self, folder: WanFolder, device: torch.device):
        self._vae = AutoencoderKLWan.from_pretrained(folder.path / "vae", dtype=torch.float32).eval().to(device)
        self._mean_C111 = torch.tensor(folder.vae["latents_mean"], device=device).view(-1, 1, 1, 1)
        self._std_C111 = torch.tensor(folder.vae["latents_std"], device=device).view(-1, 1, 1, 1)

    @torch.no_grad()
    def encode(self, pixels_BCFHW: Tensor) -> Tensor:
        """Pixels in [-1, 1] -> normalised latents x0_BCFHW: (z - latents_mean) / latents_std, z the posterior's mode."""
        z_BCFHW = self._vae.encode(pixels_BCFHW).latent_dist.mode()
        return (z_BCFHW - self._mean_C111) / self._std_C111

    @torch.no_grad()
    def decode(self, x0_BCFHW: Tensor) -> Tensor:
        """Normalised latents -> pixels_BCFHW in [0, 1]."""
        pixels_BCFHW = self._vae.decode(x0_BCFHW * self._std_C111 + self._mean_C111).sample
        return (pixels_BCFHW / 2 + 0.5).clamp(0, 1)


def load_media(path: Path, height: int, width: int, num_frames: int) -> Tensor:
    """One image, or the first `num_frames` of a video, scaled to cover and cropped: pixels_CFHW in [-1, 1]."""
    try:
        frames = load_video(str(path))[:num_frames] if path.suffix.lower() in VIDEOS else [_upright(path)]
    except (ImportError, AttributeError):  # what diffusers raises where imageio or imageio-ffmpeg is missing
        raise ConfigError(f"{path}: reading videos needs: pip install imageio imageio-ffmpeg.") from None
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow and imageio raise for files they cannot read
        raise ConfigError(f"{path}: cannot be read: {error}. Mend it, or take it out of the data.") from None
    if len(frames) < num_frames:
        raise ConfigError(f"{path}: has {len(frames)} frame(s), the run wants {num_frames}. Lower num_frames or drop it.")
    fitted = [ImageOps.fit(f.convert("RGB"), (width, height), Image.Resampling.LANCZOS) for f in frames]
    return torch.stack([torch.from_numpy(np.array(f)).permute(2, 0, 1) for f in fitted], dim=1) / 127.5 - 1


def _upright(path: Path) -> Image.Image:
    """An image turned as its camera says."""
    with Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


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
    name = diffusers.UniPCMultistepScheduler.load_config(folder.path / "scheduler")["_class_name"]
    kind = getattr(diffusers, name)
    key = "shift" if "shift" in kind.load_config(folder.path / "scheduler") else "flow_shift"
    scheduler = kind.from_pretrained(folder.path / "scheduler", **{key: shift})
    scheduler.set_timesteps(steps, device=noise_BCFHW.device)
    x_t_BCFHW, states = noise_BCFHW, []
    for t in scheduler.timesteps:
        sigma = t.item() / TRAIN_TIMESTEPS
        sigma_B = torch.full((len(noise_BCFHW),), sigma, device=noise_BCFHW.device)
        states.append((sigma, x_t_BCFHW))
        batch = Batch(x_t_BCFHW, noise_BCFHW, x_t_BCFHW, sigma_B, text_BLD, expert_at(sigma, folder.boundary))
        with torch.no_grad():
            x_t_BCFHW = scheduler.step(velocity(batch), t, x_t_BCFHW, return_dict=False)[0]
    return x_t_BCFHW, states


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels and frames of every sample of a run."""

    height: int
    width: int
    num_frames: int


@dataclass(frozen=True, slots=True)
class Rollouts:
    """How the teacher makes latents for prompts without media."""

    steps: int
    per_prompt: int
    keep_path: bool
    seed: int
    shift: float


class LatentCache:
    """x0 of every training sample on disk, in shards named by what they hold; a sample is found by its number."""

    def __init__(
        self, cache: Path, folder: WanFolder, items: list[Item], size: Size, rollouts: Rollouts, vae_stamp: str,
        teacher_stamp: str, shard_size: int,
    ):  # fmt: skip
        """Lay out the shards; nothing is read or written.

        Args:
            vae_stamp: stands for the VAE; for samples from media.
            teacher_stamp: stands for teacher, guidance and text; for rollouts.
            shard_size: samples per file, which is also the batch of one VAE or teacher call.
        """
        self.folder, self.size, self.rollouts = folder, size, rollouts
        media = [(item, 0) for item in items if item.media]
        made = [(item, n) for item in items if not item.media for n in range(rollouts.per_prompt)]
        self._media = self._layout(cache, media, shard_size, vae_stamp)
        self._made = self._layout(cache, made, shard_size, teacher_stamp, rollouts)
        shards = (self._media | self._made).items()
        self._place = [(item, shard, i) for shard, chunk in shards for i, (item, _) in enumerate(chunk)]
        self._manifest = cache / "latents" / f"manifest_{digest(*map(str, self._place))}.json"

    def _layout(self, cache: Path, samples: list, shard_size: int, *stamp: object) -> dict[Path, list]:
        chunks = [samples[i : i + shard_size] for i in range(0, len(samples), shard_size)]
        names = [[(i.prompt, str(i.media), i.media and i.media.stat().st_mtime_ns, n) for i, n in c] for c in chunks]
        stamp = (*map(str, stamp), str(self.size))
        files = [cache / "latents" / f"{digest(stamp, n)}.safetensors" for n in names]
        return dict(zip(files, chunks, strict=True))

    def __len__(self) -> int:
        return len(self._place)

    @property
    def prompts(self) -> list[str]:
        """The prompt of each sample."""
        return [item.prompt for item, _, _ in self._place]

    def __getitem__(self, sample: int) -> Tensor:
        """x0_CFHW of one sample, normalised, float32."""
        _, shard, i = self._place[sample]
        with safe_open(shard, "pt") as opened:
            return opened.get_tensor(f"{i}.x0")

    def lacks_rollouts(self) -> bool:
        """Whether the teacher is needed to complete the cache. Collective."""
        return bool(self._missing(self._made))

    def _missing(self, shards: dict[Path, list]) -> list[Path]:
        return distributed.from_rank_0([s for s in shards if not s.is_file()])

    def fill_media(self, device: torch.device) -> None:
        """Encode images and videos, the shards split over the ranks. Collective."""
        missing = self._missing(self._media)
        mine = missing[distributed.rank() :: distributed.world_size()]
        if mine:
            vae, progress = Vae(self.folder, device), Progress("latents from media", len(mine))
            s = self.size
            for shard in mine:
                pixels = [load_media(item.media, s.height, s.width, s.num_frames) for item, _ in self._media[shard]]
                self._write(shard, vae.encode(torch.stack(pixels).to(device)), [])
                progress.advance()
        distributed.barrier()

    def fill_rollouts(self, velocity: Callable[[Batch], Tensor], text: Callable[[str], Tensor], device: torch.device) -> None:
        """Sample with the teacher what has no media. Collective: every rank makes the same number of teacher calls."""
        missing = self._missing(self._made)
        world = distributed.world_size()
        rounds = -(-len(missing) // world)
        progress = Progress("latents from the teacher", rounds)
        for i in range(rounds):
            turn = i * world + distributed.rank()
            shard = missing[min(turn, len(missing) - 1)]  # a rank without work repeats the last: collectives must match
            x0_BCFHW, path = self._roll_out(velocity, text, self._made[shard], device)
            if turn < len(missing):
                self._write(shard, x0_BCFHW, path if self.rollouts.keep_path else [])
            progress.advance()
        distributed.barrier()

    def write_manifest(self) -> None:
        """Say in a file, for people, what each shard of the complete cache holds."""
        if distributed.rank() == 0 and not self._manifest.exists():
            shards = {f.name: [i.prompt for i, _ in c] for f, c in (self._media | self._made).items()}
            write_json(self._manifest, {"size": str(self.size), "rollouts": str(self.rollouts), "shards": shards})

    def _roll_out(self, velocity: Callable[[Batch], Tensor], text: Callable[[str], Tensor], samples: list,
                  device: torch.device) -> tuple[Tensor, list[tuple[float, Tensor]]]:  # fmt: skip
        shape = self.folder.latent_shape(self.size.height, self.size.width, self.size.num_frames)
        r = self.rollouts
        noise = [keyed_normal(shape, r.seed, "rollout", item.prompt, n) for item, n in samples]
        text_BLD = torch.stack([text(item.prompt) for item, _ in samples]).to(device)
        return denoise(velocity, self.folder, r.shift, torch.stack(noise).to(device), text_BLD, r.steps)

    def _write(self, shard: Path, x0_BCFHW: Tensor, path: list[tuple[float, Tensor]]) -> None:
        tensors = {f"{i}.x0": x0_CFHW.float().cpu().contiguous() for i, x0_CFHW in enumerate(x0_BCFHW)}
        if path:
            tensors["sigma"] = torch.tensor([sigma for sigma, _ in path])
            states_BTCFHW = torch.stack([x_t for _, x_t in path], dim=1)
            tensors |= {f"{i}.path": states.float().cpu().contiguous() for i, states in enumerate(states_BTCFHW)}
        with atomic(shard) as temporary:
            save_file(tensors, temporary)
