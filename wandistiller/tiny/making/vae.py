"""The tiny teacher's VAE, and the training loop of all its parts.

Each stage starts from a fixed seed and writes its part in bfloat16 into `folder/<part>` in diffusers' layout.
Later stages load what was written, so they are trained against the rounded weights that ship.

Shape letters: B batch, C channels, F frames, H height, W width.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch import Tensor, nn

from wandistiller.tiny.making.worlds import World, rendered
from wandistiller.utils.keyed_random import keyed_generator

log = logging.getLogger("make_tiny")
KL_WEIGHT = 1e-4


def fit(name: str, model: nn.Module, loss_at: Callable[[int], Tensor], *, steps: int, lr: float) -> None:
    """Minimise `loss_at(step)` with AdamW, 5 % warm-up, cosine decay to 1 % of `lr`, clipping at norm 1.

    Args:
        model: its parameters that require gradients are trained.
        loss_at: returns the scalar loss of step 0, 1, ...; all its randomness must be keyed by the step.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warm_up = max(1, steps // 20)
    started, mean_loss = time.monotonic(), None
    for step in range(steps):
        decay = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * min((step + 1) / warm_up, decay)
        loss = loss_at(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        mean_loss = loss.item() if mean_loss is None else 0.98 * mean_loss + 0.02 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            left = minutes / (step + 1) * (steps - step - 1)
            text = "%s %d/%d, loss %.5f, %.1f min, %.1f min left"
            log.info(text, name, step + 1, steps, mean_loss, minutes, left)


@contextmanager
def one_frame_convolutions() -> Iterator[None]:
    """Compute every causal 3-D convolution of the VAE as a 2-D one: for one frame the same numbers.

    A causal kernel sees one frame in its last time slice and zero padding in the others.
    """

    def forward(self: WanCausalConv3d, x_BCFHW: Tensor, cache_x: None = None) -> Tensor:
        padding = (self._padding[2], self._padding[0])
        kernel = self.weight[:, :, -1]
        return F.conv2d(x_BCFHW.squeeze(2), kernel, self.bias, self.stride[1:], padding).unsqueeze(2)

    stock_forward = WanCausalConv3d.forward
    WanCausalConv3d.forward = forward
    try:
        yield
    finally:
        WanCausalConv3d.forward = stock_forward


@contextmanager
def channels_last(vae: AutoencoderKLWan) -> Iterator[None]:
    """Keep the weights of convolutions in the order in which a CPU takes a quarter less time for a step."""
    convolutions = [module for module in vae.modules() if isinstance(module, nn.Conv3d)]
    for module in convolutions:
        module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
    try:
        yield
    finally:
        for module in convolutions:
            module.weight.data = module.weight.data.contiguous()


def fast_convolutions(world: World, vae: AutoencoderKLWan) -> AbstractContextManager[None]:
    """Choose the faster form of the VAE's convolutions for clips of one frame, or of more."""
    return one_frame_convolutions() if world.frames == 1 else channels_last(vae)


def decoded(vae: AutoencoderKLWan, z_BCFHW: Tensor) -> Tensor:
    """Decode latents as `vae.decode` does, but without its clamp, where gradients would end."""
    vae.clear_cache()
    hidden_BCFHW = vae.post_quant_conv(z_BCFHW)
    chunks = []
    for frame_BCFHW in hidden_BCFHW.split(1, dim=2):
        vae._conv_idx = [0]
        chunks.append(vae.decoder(frame_BCFHW, feat_cache=vae._feat_map, feat_idx=vae._conv_idx))
    vae.clear_cache()
    return torch.cat(chunks, dim=2)


def train_vae(world: World, folder: Path) -> None:
    """Train the VAE (8x in space, 4x in time, 16 channels) on clips of seen prompts; write `folder/vae`."""
    torch.manual_seed(1)
    if world.vae is None:
        shutil.copytree(world.vae_start, folder / "vae")
        return
    if world.vae_start is None:
        vae = AutoencoderKLWan(base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    else:
        vae = AutoencoderKLWan.from_pretrained(world.vae_start).float()

    def loss_at(step: int) -> Tensor:
        rng = keyed_generator("vae", step)
        clip_BCFHW = world.batch(world.vae.batch, rng)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(clip_BCFHW).latent_dist
            mean_BCFHW, logvar_BCFHW = posterior.mean.float(), posterior.logvar.float()
            z_BCFHW = mean_BCFHW + (0.5 * logvar_BCFHW).exp() * torch.randn(mean_BCFHW.shape, generator=rng)
            decoded_BCFHW = decoded(vae, z_BCFHW)
        kl = 0.5 * (mean_BCFHW.square() + logvar_BCFHW.exp() - 1 - logvar_BCFHW).mean()
        return F.mse_loss(decoded_BCFHW.float(), clip_BCFHW) + KL_WEIGHT * kl

    with fast_convolutions(world, vae):
        fit("vae", vae, loss_at, steps=world.vae.steps, lr=world.vae.lr)
    if world.frames == 1:
        treat_videos_as_stills(vae)
    vae.to(torch.bfloat16).float()
    write_latent_statistics(vae, world)
    vae.to(torch.bfloat16).save_pretrained(folder / "vae")


def polish_decoder(world: World, folder: Path) -> None:
    """Continue training the decoder of `folder/vae` with unchanged latents; write `polished_vae`.

    The decoder sees latents sampled from the posterior, not their means: an expert's latents are not exact
    either.
    """
    if world.polish is None:
        shutil.copytree(folder / "vae", folder / "polished_vae")
        return
    vae = AutoencoderKLWan.from_pretrained(folder / "vae").float().requires_grad_(False)
    vae.decoder.requires_grad_(True)

    def loss_at(step: int) -> Tensor:
        rng = keyed_generator("decoder", step)
        clip_BCFHW = world.batch(world.polish.batch, rng)
        with torch.autocast("cpu", torch.bfloat16):
            z_BCFHW = vae.encode(clip_BCFHW).latent_dist.sample(rng)
            decoded_BCFHW = decoded(vae, z_BCFHW)
        return F.mse_loss(decoded_BCFHW.float(), clip_BCFHW)

    with fast_convolutions(world, vae):
        fit("polished_vae", vae, loss_at, steps=world.polish.steps, lr=world.polish.lr)
    vae.to(torch.bfloat16).save_pretrained(folder / "polished_vae")


@torch.no_grad()
def treat_videos_as_stills(vae: AutoencoderKLWan) -> None:
    """Give the time slices that one frame cannot train a meaning: every frame is coded on its own.

    Slices that look into the past become zero. Temporal down-sampling keeps the last of each pair of frames
    and temporal up-sampling shows each twice, so a video of one still picture comes back as that still
    picture.
    """
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d):
            module.weight[:, :, :-1] = 0
        if isinstance(module, WanResample) and module.mode in ("downsample3d", "upsample3d"):
            conv = module.time_conv
            copies = conv.out_channels // conv.in_channels
            conv.weight[:, :, -1, 0, 0] = torch.eye(conv.in_channels).repeat(copies, 1)
            conv.bias.zero_()


@torch.no_grad()
def encoded(
    vae: AutoencoderKLWan, world: World, scenes: list[tuple[int, int]], *, first_frames: bool = False
) -> Tensor:
    """Encode clips, given the index of a seen prompt and the seed of each: the posterior's mean, z_BCFHW.

    Args:
        first_frames: of each clip the first frame alone, followed by grey ones.
    """
    parts = (rendered(world, scenes[start : start + 64]) for start in range(0, len(scenes), 64))
    parts = map(first_alone, parts) if first_frames else parts
    with fast_convolutions(world, vae):
        return torch.cat([vae.encode(clip_BCFHW).latent_dist.mode() for clip_BCFHW in parts])


def first_alone(clip_BCFHW: Tensor) -> Tensor:
    """Return clips in [-1, 1] whose frames are grey after the first."""
    return torch.cat([clip_BCFHW[:, :, :1], torch.zeros_like(clip_BCFHW[:, :, 1:])], dim=2)


def write_latent_statistics(vae: AutoencoderKLWan, world: World) -> None:
    """Put each latent channel's mean and standard deviation over the seen scenes into the VAE's config."""
    z_BCFHW = encoded(vae, world, [(scene, 0) for scene in range(len(world.seen))])
    std_C, mean_C = torch.std_mean(z_BCFHW, dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean_C.tolist(), latents_std=std_C.tolist())


def latent_statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Return the VAE's mean_1C111 and std_1C111; a normalised latent is (z - mean) / std, as in diffusers."""
    mean_C, std_C = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean_C.view(1, -1, 1, 1, 1), std_C.view(1, -1, 1, 1, 1)


@torch.no_grad()
def reproduced(vae: AutoencoderKLWan, clip_BCFHW: Tensor) -> Tensor:
    """Encode and decode clips in [-1, 1] as `WanPipeline` does."""
    latents = (vae.encode(part).latent_dist.mode() for part in clip_BCFHW.split(32))
    return torch.cat([vae.decode(z_BCFHW).sample for z_BCFHW in latents])


def vae_psnr(vae: AutoencoderKLWan, world: World, *, seed: int) -> float:
    """Measure the PSNR in dB (clip in [0, 1]) of encoding and decoding the held-out prompts' clips."""
    clip_BCFHW = torch.stack([world.render(prompt, seed) for prompt in world.held_out]) * 2 - 1
    return -10 * math.log10((reproduced(vae, clip_BCFHW) - clip_BCFHW).div(2).square().mean().item())
