"""The run's samples: their numbers, the order of training, cached latents and text, and training batches."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from wandistiller.batch import Batch, Conditioning, State, to_device
from wandistiller.data.conditions import ConditionKey, Conditions
from wandistiller.data.dataset import PromptDataset, PromptItem
from wandistiller.data.latent_cache import LatentCache
from wandistiller.data.media import Size
from wandistiller.data.sample_order import Permutation, SampleOrder
from wandistiller.data.tensor_cache import Measured, Sample
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.engine.batch_size import BatchSize
from wandistiller.flow import FLOW_MAP, FlowSchedule
from wandistiller.utils.errors import ConfigError


class AllSamples:
    """All samples of the data by number: media, then prompts without media `per_prompt` times each."""

    def __init__(self, items: PromptDataset, per_prompt: int, sizes: list[Size], size_of: np.ndarray):
        """Number them.

        Args:
            sizes: the first is the run's and that of rollouts.
            size_of: index into `sizes` for each item.
        """
        self._items, self._per_prompt, self._sizes = items, per_prompt, sizes
        made = items.made
        self._prompts, self._media = np.flatnonzero(made), np.flatnonzero(~made)
        size_N = np.concatenate([size_of[~made], np.repeat(size_of[made], per_prompt)])
        self._size_of = size_N.astype(np.int16)
        self.groups = {s: np.flatnonzero(self._size_of == s) for s in np.unique(self._size_of).tolist()}
        """Numbers of the samples of each size that occurs, by the size's index."""

    def group_of(self, number: int) -> np.ndarray:
        return self.groups[int(self._size_of[number])]

    def __getitem__(self, number: int) -> Sample:
        size = self._sizes[self._size_of[number]]
        if number < len(self._media):
            return Sample(self._items[int(self._media[number])], size)
        prompt, rollout_index = divmod(number - len(self._media), self._per_prompt)
        return Sample(self._items[int(self._prompts[prompt])], size, rollout_index)


class SampleSelection:
    """The samples that the first `steps` optimizer steps use, with stand-ins for unusable ones."""

    def __init__(self, samples: AllSamples, *, seed: int, global_batch: int, steps: int):
        self.samples, self._groups, self._seed = samples, list(samples.groups.values()), seed
        self._order = SampleOrder([len(group) for group in self._groups], seed, global_batch)
        self._global_batch = global_batch
        used = zip(self._groups, self._order.used_members(steps), strict=True)
        self.numbers = [int(n) for group, members in used for n in np.sort(group[members.numpy()])]
        """All samples of the run, unusable ones included."""
        self._drawn = len(self.numbers)
        self._bad: set[int] = set()
        self._instead: dict[int, int] = {}

    def number_at(self, sample_index: int) -> int:
        """Return the number of the sample at a global index, `step * global_batch` + slot."""
        group, member = self._order.locate(sample_index)
        number = int(self._groups[group][member])
        return self._instead.get(number, number)

    def used_in(self, steps: Iterable[int]) -> set[int]:
        """Return the numbers of the samples of these optimizer steps."""
        size = self._global_batch
        return {self.number_at(step * size + slot) for step in steps for slot in range(size)}

    def replace(self, unusable: Iterable[int]) -> list[int]:
        """Replace samples for the rest of the run; return the numbers that were not used before.

        Raises:
            ConfigError: no sample is usable.
        """
        self._bad |= set(unusable)
        drawn = self.numbers[: self._drawn]
        self._instead = {number: self._stand_in(number) for number in drawn if number in self._bad}
        new = sorted(set(self._instead.values()) - set(self.numbers))
        self.numbers += new
        return new

    def _stand_in(self, number: int) -> int:
        """Return a sample of the same size; else one of the most common size, for the whole step."""
        for group in (self.samples.group_of(number), max(self._groups, key=len)):
            shuffled = Permutation(len(group), self._seed, "instead", number)
            candidates = (int(group[shuffled(place)]) for place in range(len(group)))
            if (usable := next((n for n in candidates if n not in self._bad), None)) is not None:
                return usable
        raise ConfigError("None of the images and videos can be used.")

    def shuffled(self, numbers: Iterable[int]) -> list[int]:
        numbers = list(numbers)
        order = Permutation(len(numbers), self._seed, "shuffled").head(len(numbers))
        return [numbers[i] for i in order.tolist()]

    def used(self) -> list[int]:
        return [n for n in self.numbers if n not in self._bad]


class CachedData:
    """Clean latents and text in the order of training."""

    def __init__(
        self,
        selection: SampleSelection,
        samples: dict[int, Sample],
        latents: LatentCache,
        conditions: Conditions,
        sample_items: list[PromptItem],
        *,
        measured: Measured,
        with_latents: set[int],
    ):
        """Serve `samples`, the run's own by number, from the caches that hold them.

        Args:
            sample_items: what pictures are drawn of.
            with_latents: numbers of the samples of which more than the conditioning is cached.
        """
        self.sample_items, self.measured = sample_items, measured
        self.has_latents = bool(with_latents)
        self.selection, self._latents, self._conditions = selection, latents, conditions
        self._keys = {n: (latents.key(s), conditions.key(s)) for n, s in samples.items()}
        by_size: dict[Size, list[int]] = {}
        for number in selection.shuffled(n for n in samples if n in with_latents):
            by_size.setdefault(samples[number].size, []).append(number)
        self._common = max(by_size.values(), key=len, default=[])

    def item_at(self, sample_index: int) -> PromptItem:
        """Return the prompt, and the medium if there is one, at a global index."""
        return self.selection.samples[self.selection.number_at(sample_index)].item

    def _keys_at(self, sample_index: int) -> tuple[str, ConditionKey]:
        return self._keys[self.selection.number_at(sample_index)]

    def x0(self, sample_index_B: list[int]) -> Tensor:
        """Return x0_BCFHW, normalised, float32, of sample indices of one step."""
        return self._x0([self._keys_at(i)[0] for i in sample_index_B])

    def conditioning(self, sample_index_B: list[int]) -> Conditioning:
        """Return the conditioning of sample indices; text is zero-padded to the longest."""
        return self._conditions.batch([self._keys_at(i)[1] for i in sample_index_B]).map(self._moved)

    def examples(self, number_B: list[int]) -> tuple[Tensor, Conditioning]:
        """Return x0 and conditioning to calibrate with: shuffled samples of the most common size, wrapped."""
        keys = [self._keys[self._common[n % len(self._common)]] for n in number_B]
        conditioning = self._conditions.batch([key for _, key in keys]).map(self._moved)
        return self._x0([latent for latent, _ in keys]), conditioning

    def _x0(self, keys: list[str]) -> Tensor:
        return self._moved(torch.stack([self._latents[key] for key in keys]))

    def levels(self, sample_index_B: list[int]) -> Tensor:
        """Return sigma_S of the teacher's paths of sample indices, falling to 0.0, where the state is x0."""
        return self._moved(self._latents.levels(self._keys_at(sample_index_B[0])[0]))

    def states(self, sample_index_B: list[int], state_B: list[int]) -> Tensor:
        """Return x_BCFHW, float32: of each sample's path the state of this number; the first is the noise."""
        keys = [self._keys_at(i)[0] for i in sample_index_B]
        return self._moved(torch.stack([*map(self._latents.state, keys, state_B)]))

    def _moved(self, t: Tensor) -> Tensor:
        return to_device(t, self._latents.device)

    def has_rollouts(self, items: list[PromptItem], size: Size) -> bool:
        """Return whether the teacher's first rollout of each item is cached, at this size."""
        samples = [Sample(item, size) for item in items]
        return all(not s.item.media and self._latents.key(s) in self._latents for s in samples)

    def x0_of(self, items: list[PromptItem], size: Size) -> Tensor:
        """Return x0_BCFHW of the teacher's first rollout of each item."""
        return self._x0([self._latents.key(Sample(item, size)) for item in items])


class MicroBatches:
    """Training data of this rank by update and micro-step: a function of the seed, with nothing to resume.

    Updates are counted from 0 over the whole run. A step has one of the student, and those of other roles.
    """

    def __init__(
        self,
        data: CachedData,
        schedule: FlowSchedule,
        size: BatchSize,
        latent: tuple[int, ...] = (),
        ranks: Ranks = ALONE,
    ):
        """Serve `data`; `latent` is the shape CFHW of samples that are drawn without data."""
        self._data, self.schedule, self._size, self.latent = data, schedule, size, latent
        self._ranks = ranks

    def noised(self, update: int, micro: int) -> Batch:
        """Return cached latents with noise added, all of one expert, which is equal on all ranks."""
        index_B, schedule = self.indices(update, micro), self.schedule
        batch = schedule.noised(self._data.x0(index_B), self._data.conditioning(index_B), index_B, update)
        if schedule.few and schedule.few.sampler == FLOW_MAP:
            return replace(batch, end_B=schedule.ends(batch.sigma_B, index_B, update))
        return batch

    def noised_as(self, like: State, update: int, micro: int, begun: int) -> Batch:
        """Return cached latents of `like`'s prompts, those of the update `begun`, at its noise levels."""
        x0_BCFHW = self._data.x0(self.indices(begun, micro))
        return self.schedule.noised_as(like, x0_BCFHW, self.indices(update, micro), update)

    def on_path(self, update: int, micro: int) -> Batch:
        index_B = self.indices(update, micro)
        states, conditioning = partial(self._data.states, index_B), self._data.conditioning(index_B)
        return self.schedule.on_path(self._data.levels(index_B), states, conditioning, index_B, update)

    def conditioning(self, update: int, micro: int) -> Conditioning:
        """Return the conditioning alone, for samples that are drawn without data."""
        return self._data.conditioning(self.indices(update, micro))

    def indices(self, update: int, micro: int) -> list[int]:
        """Return this rank's global sample indices: consecutive, divided by micro-step and then by rank.

        Ranks that share a sequence have the same.
        """
        size, ranks = self._size, self._ranks
        first = update * size.total + (micro * ranks.replicas + ranks.replica) * size.micro
        return list(range(first, first + size.micro))

    def items(self, update: int, micro: int) -> list[PromptItem]:
        return [self._data.item_at(index) for index in self.indices(update, micro)]
