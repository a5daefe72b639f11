"""The two experts of the tiny teacher: first one transformer for every sigma, then one per sigma range.

Flow matching as in Wan: x_sigma = (1 - sigma) x_0 + sigma noise, the model predicts noise - x_0 at timestep
1000 sigma, and sigma = shift u / (1 + (shift - 1) u) with u uniform. The shift is the sampler's own.

Shape letters: N seen prompts, V clips per prompt, W wordings per prompt or width, B batch, C channels, F
frames, H height, S latent tokens, L text tokens, D width of text or of the transformer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.experts import Expert
from wandistiller.tiny.making.text import NULL_PROMPTS, all_wordings, embedded
from wandistiller.tiny.making.vae import encoded, fit, latent_statistics
from wandistiller.tiny.making.worlds import Stage, World
from wandistiller.utils.keyed_random import keyed_generator
from wandistiller.wan.loaded_components import mask_of
from wandistiller.wan.text_padding import merge_text_padding
from wandistiller.wan.transformer import velocity

FLOW_SHIFT = 3.0
DROPPED_PROMPTS = 0.1
CANONICAL_WORDING = 0.6
"""Share of the prompts in the canonical wording; the rest are paraphrases."""
EXPERT_CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "freq_dim": 64,
    "text_dim": 96,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": (1, 2, 2),
    "rope_max_seq_len": 64,
}


@contextmanager
def bfloat16_feed_forwards(model: WanTransformer3DModel) -> Iterator[None]:
    """Run the feed-forwards, two thirds of the work, in bfloat16.

    On a CPU, autocast over everything is no faster than float32: it spends on casts what it saves on
    products.
    """
    for block in model.blocks:
        block.ffn.forward = torch.autocast("cpu", torch.bfloat16)(block.ffn.forward)
    try:
        yield
    finally:
        for block in model.blocks:
            del block.ffn.forward


@dataclass(frozen=True, slots=True)
class Cache:
    """All that a step needs: normalised latents and text embeddings of the seen prompts."""

    latent_NVCFHW: Tensor
    joined_NVCFHW: Tensor | None
    """Mask and latents of the given frames, for a network that takes them."""
    text_NWLD: Tensor
    null_2LD: Tensor

    @classmethod
    @torch.no_grad()
    def build(cls, world: World, folder: Path) -> "Cache":
        """Encode every seen prompt, its clips, and the two null prompts with the parts in `folder`."""
        vae = AutoencoderKLWan.from_pretrained(folder / "vae").float()
        mean_1C111, std_1C111 = latent_statistics(vae)
        scenes = [(scene, seed) for scene in range(len(world.seen)) for seed in range(world.variants)]
        z_BCFHW, joined_BCFHW = encoded(vae, world, scenes), None
        if world.begins:
            given_BCFHW = (encoded(vae, world, scenes, first_frames=True) - mean_1C111) / std_1C111
            mask_CF = mask_of([0], world.frames, vae.config.scale_factor_temporal)
            mask_BCFHW = mask_CF[None, ..., None, None].expand(len(scenes), -1, -1, *given_BCFHW.shape[3:])
            joined_BCFHW = torch.cat([mask_BCFHW, given_BCFHW], dim=1).unflatten(0, (-1, world.variants))
        text_BLD = embedded(folder, all_wordings(world) + list(NULL_PROMPTS))
        return cls(
            ((z_BCFHW - mean_1C111) / std_1C111).unflatten(0, (-1, world.variants)),
            joined_BCFHW,
            text_BLD[:-2].unflatten(0, (-1, len(world.templates))),
            text_BLD[-2:],
        )

    def draw(self, size: int, rng: torch.Generator) -> tuple[Tensor, Conditioning]:
        """A batch of `size` samples: latent_BCFHW and conditioning, some of whose prompts are dropped."""
        scene_B = torch.randint(len(self.latent_NVCFHW), (size,), generator=rng)
        variant_B = torch.randint(self.latent_NVCFHW.shape[1], (size,), generator=rng)
        wording_B = torch.randint(1, self.text_NWLD.shape[1], (size,), generator=rng)
        wording_B[torch.rand(size, generator=rng) < CANONICAL_WORDING] = 0
        text_BLD = self.text_NWLD[scene_B, wording_B]
        dropped_B = torch.rand(size, generator=rng) < DROPPED_PROMPTS
        null_B = torch.randint(len(NULL_PROMPTS), (size,), generator=rng)
        text_BLD = torch.where(dropped_B[:, None, None], self.null_2LD[null_B], text_BLD)
        joined_NVCFHW = self.joined_NVCFHW
        joined_BCFHW = None if joined_NVCFHW is None else joined_NVCFHW[scene_B, variant_B]
        return self.latent_NVCFHW[scene_B, variant_B], Conditioning(text_BLD, joined_BCFHW)


def draw_sigma(size: int, sigmas: tuple[float, float], rng: torch.Generator) -> Tensor:
    """Sample the shifted distribution of sigma, restricted to a range: sigma_B in [0, 1].

    With the shift s, sigma = s u / (1 + (s - 1) u) has the inverse u = sigma / (s - (s - 1) sigma).
    Source: Esser et al. 2024, arXiv:2403.03206, resolution-dependent shift.
    """
    low, high = (sigma / (FLOW_SHIFT - (FLOW_SHIFT - 1) * sigma) for sigma in sigmas)
    u_B = low + (high - low) * torch.rand(size, generator=rng)
    return FLOW_SHIFT * u_B / (1 + (FLOW_SHIFT - 1) * u_B)


def velocity_loss(model: WanTransformer3DModel, cache: Cache, stage: Stage, step: int) -> Tensor:
    """Mean squared error of the predicted velocity noise - x_0 on the batch of `step`, which is keyed."""
    rng = keyed_generator(stage.part, step)
    latent_BCFHW, conditioning = cache.draw(stage.run.batch, rng)
    noise_BCFHW = torch.randn(latent_BCFHW.shape, generator=rng)
    sigma_B = draw_sigma(stage.run.batch, stage.sigmas, rng)
    sigma_B1111 = sigma_B.view(-1, 1, 1, 1, 1)
    noisy_BCFHW = (1 - sigma_B1111) * latent_BCFHW + sigma_B1111 * noise_BCFHW
    expert = Expert.HIGH_NOISE
    state = State(x_t_BCFHW=noisy_BCFHW, sigma_B=sigma_B, conditioning=conditioning, expert=expert)
    velocity_BCFHW = velocity(model, state)
    return F.mse_loss(velocity_BCFHW, noise_BCFHW - latent_BCFHW)


def train_expert(world: World, folder: Path, cache: Cache, stage: Stage) -> None:
    """Run one stage and write its model in bfloat16 to `folder/<part>`."""
    torch.manual_seed(3)
    model = WanTransformer3DModel(**EXPERT_CONFIG | world.expert)
    if stage.start is not None:
        start = WanTransformer3DModel.from_pretrained(folder / stage.start).float()
        model.load_state_dict(start.state_dict())
    merge_text_padding(model)
    with bfloat16_feed_forwards(model):
        loss_at = partial(velocity_loss, model, cache, stage)
        fit(stage.part, model, loss_at, steps=stage.run.steps, lr=stage.run.lr)
    model.to(torch.bfloat16).save_pretrained(folder / stage.part)
