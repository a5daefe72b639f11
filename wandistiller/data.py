"""Cached samples by number. Which sample stands at which place is a function of (seed, place): nothing to resume."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from wandistiller import distributed
from wandistiller.conditioning import TextCache
from wandistiller.items import Item, Items, Kind
from wandistiller.latents import LatentCache, Sample
from wandistiller.media import Size
from wandistiller.order import Order, Permutation
from wandistiller.problems import ConfigError

STAMPED = 16
"""Samples that stand for a cache."""


class Samples:
    """All samples that the data could give, by number: media once, prompts without media `per_prompt` times."""

    def __init__(self, items: Items, per_prompt: int, sizes: list[Size], size_of: np.ndarray | None = None):
        """Number them.

        Args:
            sizes: the first is the run's, which rollouts have.
            size_of: which of them each medium is cut to; the first, if left out.
        """
        self._items, self._per_prompt, self._sizes = items, per_prompt, sizes
        self._media, self._made = np.flatnonzero(items.kinds != Kind.PROMPT), np.flatnonzero(items.kinds == Kind.PROMPT)
        self._size_of = np.zeros(len(self._media), np.int16) if size_of is None else size_of.astype(np.int16)
        size_of_all = np.concatenate([self._size_of, np.zeros(len(self._made) * per_prompt, np.int16)])
        self.groups = [group for s in range(len(sizes)) if len(group := np.flatnonzero(size_of_all == s))]
        """Numbers of the samples of each size that occurs."""

    def __getitem__(self, number: int) -> Sample:
        if number < len(self._media):
            return Sample(self._items[int(self._media[number])], self._sizes[self._size_of[number]])
        prompt, take = divmod(number - len(self._media), self._per_prompt)
        return Sample(self._items[int(self._made[prompt])], self._sizes[0], take)


class Selection:
    """The samples that the first `steps` optimizer steps use; others take the place of those that cannot be used."""

    def __init__(self, samples: Samples, *, seed: int, global_batch: int, steps: int):
        self.samples, self._groups, self._seed = samples, samples.groups, seed
        self._order = Order([len(group) for group in self._groups], seed, global_batch)
        reached = zip(self._groups, self._order.reached(steps), strict=True)
        self.numbers = [int(n) for group, members in reached for n in np.sort(group[members.numpy()])]
        """All that are used, and those that were to be but cannot."""
        self._reached = len(self.numbers)
        self._bad: set[int] = set()
        self._instead: dict[int, int] = {}

    def sample_at(self, sample_index: int) -> int:
        """The number of the sample that stands at a global index."""
        group, member = self._order.place(sample_index)
        number = int(self._groups[group][member])
        return self._instead.get(number, number)

    def replace(self, unusable: Iterable[int]) -> list[int]:
        """Put others in the place of samples, for good; returns the numbers that were not used before.

        Raises:
            ConfigError: there is no other.
        """
        self._bad |= set(unusable)
        self._instead = {number: self._stand_in(number) for number in self.numbers[: self._reached] if number in self._bad}
        new = sorted(set(self._instead.values()) - set(self.numbers))
        self.numbers += new
        return new

    def _stand_in(self, number: int) -> int:
        """A sample of the same size; if there is none, one of the size that most have, as for all samples of that step."""
        own = next(group for group in self._groups if group[np.searchsorted(group, number) % len(group)] == number)
        for group in (own, max(self._groups, key=len)):
            shuffled = Permutation(len(group), self._seed, "instead", number)
            for place in range(len(group)):
                if (candidate := int(group[shuffled(place)])) not in self._bad:
                    return candidate
        raise ConfigError("None of the images and videos can be used.")

    def shuffled(self, numbers: Iterable[int]) -> list[int]:
        """The same numbers in an order that depends on the seed."""
        numbers = list(numbers)
        return [numbers[i] for i in Permutation(len(numbers), self._seed, "shuffled").head(len(numbers)).tolist()]

    def used(self) -> list[int]:
        """The numbers of the samples that are used."""
        return [n for n in self.numbers if n not in self._bad]


class CachedData:
    """Clean latents and text in the order of training."""

    def __init__(
        self, selection: Selection, samples: dict[int, Sample], latents: LatentCache, text: TextCache, device: torch.device
    ):
        """`samples`: those that the run uses, by number; they are in the caches."""
        self._selection, self._latents, self._text, self._device = selection, latents, text, device
        self._keys = {n: (latents.key(s), text.key(s.item.prompt)) for n, s in samples.items()}
        by_size: dict[Size, list[int]] = {}
        for number in selection.shuffled(samples):
            by_size.setdefault(samples[number].size, []).append(number)
        self._common = max(by_size.values(), key=len)
        self._made = next((s for s in samples.values() if not s.item.media), None)
        self.has_paths = latents.rollouts.keep_path and not any(s.item.media for s in samples.values())
        """Whether `states` can be asked for: the recipe has `rollout_path`, and no sample came from media."""

    def __len__(self) -> int:
        """Samples that the run uses."""
        return len(self._keys)

    def stamps(self, of: Iterable[str] | None = None) -> dict[str, str]:
        """Sample -> digest of its x0 and text as they can be read now; of a few spread evenly over all. Collective.

        Args:
            of: the samples to look at, as an earlier run's `stamps` named them; those that this run does not use are left out.
        """
        used = list(dict.fromkeys(self._keys.values()))
        if of is None:
            chosen = used[:: -(-len(used) // STAMPED)]
        else:
            known = set(used)
            chosen = [keys for keys in map(tuple, (name.split(".") for name in of)) if keys in known]
        found = {}
        with distributed.same_problems():
            if distributed.rank() == 0:
                found = {".".join(keys): _digest(self._latents[keys[0]], self._text.read(keys[1])) for keys in chosen}
        return distributed.from_rank_0(found)

    def sample_at(self, sample_index: int) -> int:
        """The number of the sample that stands at a global index, `step * global_batch` + slot."""
        return self._selection.sample_at(sample_index)

    def item_at(self, sample_index: int) -> Item:
        """The prompt, and the medium if there is one, at a global index."""
        return self._selection.samples[self.sample_at(sample_index)].item

    def _keys_at(self, sample_index: int) -> tuple[str, str]:
        number = self.sample_at(sample_index)
        if number not in self._keys:
            raise IndexError(f"Sample index {sample_index} is beyond the run's last step; only what a run uses is cached.")
        return self._keys[number]

    def batch(self, sample_index_B: list[int]) -> tuple[Tensor, Tensor]:
        """x0_BCFHW (normalised latents, float32) and text_BLD (zero-padded) of global sample indices of one step."""
        return self._stacked([self._keys_at(i) for i in sample_index_B])

    def examples(self, number_B: list[int]) -> tuple[Tensor, Tensor]:
        """The same of shuffled samples of the commonest size, from 0 on and then around: to measure with, in any batches."""
        return self._stacked([self._keys[self._common[n % len(self._common)]] for n in number_B])

    def _stacked(self, keys: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        x0_BCFHW = torch.stack([self._latents[latent] for latent, _ in keys])
        text_BLD = torch.stack([self._text.read(text) for _, text in keys])
        return self._moved(x0_BCFHW), self._moved(text_BLD)

    def states(self, sample_index_B: list[int]) -> tuple[Tensor, Tensor]:
        """The teacher's paths of global sample indices, float32: sigma_S, falling to 0.0, and x_BSCFHW, S = steps + 1.

        State s belongs to sigma_S[s]; the first is the noise, the last is x0.
        """
        found = [self._latents.states(self._keys_at(i)[0]) for i in sample_index_B]
        return self._moved(found[0][0]), self._moved(torch.stack([x_SCFHW for _, x_SCFHW in found]))

    def _moved(self, t: Tensor) -> Tensor:
        """To the accelerator, without waiting until that has done all it was given, as a copy from pageable memory would."""
        return t.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else t

    def knows(self, prompts: list[str]) -> bool:
        """Whether the teacher's first rollout of each prompt is cached."""
        return self._made is not None and all(self._rollout(p) in self._latents for p in prompts)

    def x0_of(self, prompts: list[str]) -> Tensor:
        """x0_BCFHW of the teacher's first rollout of each prompt."""
        return torch.stack([self._latents[self._rollout(p)] for p in prompts]).to(self._device)

    def _rollout(self, prompt: str) -> str:
        return self._latents.key(Sample(Item(prompt), self._made.size))


def _digest(*tensors: Tensor) -> str:
    """16 hex digits that stand for the bytes."""
    made = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        made.update(tensor.contiguous().view(torch.uint8).numpy())
    return made.hexdigest()
