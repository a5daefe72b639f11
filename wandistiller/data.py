"""Cached samples by number. Which sample stands at which place is a function of (seed, place): nothing to resume."""

from functools import lru_cache

import torch
from torch import Tensor

from wandistiller.conditioning import TextCache
from wandistiller.latents import LatentCache
from wandistiller.noise import keyed_generator


class CachedData:
    """Clean latents and text, shuffled anew each epoch."""

    def __init__(self, latents: LatentCache, text: TextCache, *, seed: int, global_batch: int, device: torch.device):
        self._latents, self._text, self._device = latents, text, device
        self._prompts = latents.prompts
        self._seed, self._global_batch = seed, global_batch

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._latents)

    def sample_at(self, sample_index: int) -> int:
        """The sample that stands at a global index: index i is place i % N of epoch i // N."""
        epoch, place = divmod(sample_index, len(self))
        return _order(len(self), self._seed, epoch)[place]

    def batch(self, sample_index_B: list[int]) -> tuple[Tensor, Tensor]:
        """x0_BCFHW (normalised latents, float32) and text_BLD (zero-padded) of global sample indices."""
        samples = [self.sample_at(i) for i in sample_index_B]
        x0_BCFHW = torch.stack([self._latents[s] for s in samples])
        text_BLD = torch.stack([self._text[self._prompts[s]] for s in samples])
        return x0_BCFHW.to(self._device), text_BLD.to(self._device)


@lru_cache(maxsize=2)
def _order(samples: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(samples, generator=keyed_generator(seed, "order", epoch)).tolist()
