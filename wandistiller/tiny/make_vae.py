"""The tiny teacher's VAE, and the training loop of all its parts.

Each stage starts from a fixed seed and writes its part in bfloat16 into `folder/<part>` in diffusers' layout.
Later stages load what was written, so they are trained against the rounded weights that ship.

Shape letters: N all training pictures, B batch, C channels, F frames, H height, W width.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch import Tensor, nn

from wandistiller.flow import keyed_generator
from wandistiller.tiny import shapes

log = logging.getLogger("make_tiny")
VAE_STEPS, VAE_BATCH, VAE_LR = 2400, 16, 1.5e-3
POLISH_STEPS, POLISH_LR = 1500, 1e-3
VAE_VARIANTS = 8
"""Jittered pictures per seen prompt that the VAE learns from."""
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


def rendered(prompts: list[str], seeds: Iterable[int]) -> Tensor:
    """Draw the VAE's inputs, prompt-major: frame_BCFHW in [-1, 1] with F = 1."""
    image_BCHW = torch.stack([shapes.render(prompt, seed) for prompt in prompts for seed in seeds])
    return image_BCHW.unsqueeze(2) * 2 - 1


def train_vae(folder: Path) -> None:
    """Train the 8x-compressing, 16-channel VAE on pictures of seen prompts; write `folder/vae`."""
    torch.manual_seed(1)
    vae = AutoencoderKLWan(base_dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    frame_NCFHW = rendered(shapes.seen_prompts(), range(VAE_VARIANTS))

    def loss_at(step: int) -> Tensor:
        rng = keyed_generator("vae", step)
        frame_BCFHW = frame_NCFHW[torch.randint(len(frame_NCFHW), (VAE_BATCH,), generator=rng)]
        with torch.autocast("cpu", torch.bfloat16):
            mean_BCFHW, logvar_BCFHW = vae.quant_conv(vae.encoder(frame_BCFHW)).float().chunk(2, dim=1)
            logvar_BCFHW = logvar_BCFHW.clamp(-30, 20)
            z_BCFHW = mean_BCFHW + (0.5 * logvar_BCFHW).exp() * torch.randn(mean_BCFHW.shape, generator=rng)
            decoded_BCFHW = vae.decoder(vae.post_quant_conv(z_BCFHW))
        kl = 0.5 * (mean_BCFHW.square() + logvar_BCFHW.exp() - 1 - logvar_BCFHW).mean()
        return F.mse_loss(decoded_BCFHW.float(), frame_BCFHW) + KL_WEIGHT * kl

    with one_frame_convolutions():
        fit("vae", vae, loss_at, steps=VAE_STEPS, lr=VAE_LR)
    treat_videos_as_stills(vae)
    vae.to(torch.bfloat16).float()
    write_latent_statistics(vae, frame_NCFHW[::VAE_VARIANTS])
    vae.to(torch.bfloat16).save_pretrained(folder / "vae")


def polish_decoder(folder: Path) -> None:
    """Continue training the decoder of `folder/vae` with unchanged latents; write `polished_vae`.

    The decoder sees latents sampled from the posterior, not their means: an expert's latents are not exact
    either.
    """
    vae = AutoencoderKLWan.from_pretrained(folder / "vae").float().requires_grad_(False)
    vae.decoder.requires_grad_(True)
    frame_NCFHW = rendered(shapes.seen_prompts(), range(VAE_VARIANTS))

    def loss_at(step: int) -> Tensor:
        rng = keyed_generator("decoder", step)
        frame_BCFHW = frame_NCFHW[torch.randint(len(frame_NCFHW), (VAE_BATCH,), generator=rng)]
        with torch.autocast("cpu", torch.bfloat16):
            z_BCFHW = vae.encode(frame_BCFHW).latent_dist.sample(rng)
            decoded_BCFHW = vae.decoder(vae.post_quant_conv(z_BCFHW))
        return F.mse_loss(decoded_BCFHW.float(), frame_BCFHW)

    with one_frame_convolutions():
        fit("polished_vae", vae, loss_at, steps=POLISH_STEPS, lr=POLISH_LR)
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
def write_latent_statistics(vae: AutoencoderKLWan, frame_BCFHW: Tensor) -> None:
    """Put each latent channel's mean and standard deviation over these pictures into the VAE's config."""
    z_BCFHW = torch.cat([vae.encode(part).latent_dist.mode() for part in frame_BCFHW.split(64)])
    std_C, mean_C = torch.std_mean(z_BCFHW, dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean_C.tolist(), latents_std=std_C.tolist())


def latent_statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Return the VAE's mean_1C111 and std_1C111; a normalised latent is (z - mean) / std, as in diffusers."""
    mean_C, std_C = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    return mean_C.view(1, -1, 1, 1, 1), std_C.view(1, -1, 1, 1, 1)


@torch.no_grad()
def vae_psnr(vae: AutoencoderKLWan, prompts: list[str], *, seed: int) -> float:
    """Measure the PSNR in dB (image in [0, 1]) of encoding and decoding the prompts' pictures."""
    frame_BCFHW = rendered(prompts, [seed])
    decoded_BCFHW = vae.decode(vae.encode(frame_BCFHW).latent_dist.mode()).sample.clamp(-1, 1)
    return -10 * math.log10((decoded_BCFHW - frame_BCFHW).div(2).square().mean().item())
