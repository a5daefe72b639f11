"""Training batches: the samples of each micro-step on this rank, at noised states or on cached paths."""

from functools import partial

from wandistiller.batch import Batch, Conditioning, State
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.dataset import PromptItem
from wandistiller.distributed.sequence_parallel import ALONE, Ranks
from wandistiller.engine.batch_size import BatchSize
from wandistiller.flow import FlowSchedule


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
        index_B = self.indices(update, micro)
        return self.schedule.noised(self._data.x0(index_B), self._data.conditioning(index_B), index_B, update)

    def noised_as(self, like: State, update: int, micro: int) -> Batch:
        """Return cached latents of the same prompts at the noise levels of `like`."""
        index_B = self.indices(update, micro)
        return self.schedule.noised_as(like, self._data.x0(index_B), index_B, update)

    def on_path(self, update: int, micro: int) -> Batch:
        index_B = self.indices(update, micro)
        states, given = partial(self._data.states, index_B), self._data.conditioning(index_B)
        return self.schedule.on_path(self._data.levels(index_B), states, given, index_B, update)

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
