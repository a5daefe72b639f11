"""Training batches: the samples of each micro-step on this rank, at each kind of states."""

from functools import partial

from wandistiller.batch import GENERATED, NOISED, PATH, Batch, GeneratedBatch
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.dataset import PromptItem
from wandistiller.distributed import sequence
from wandistiller.engine.ds_config import BatchSize
from wandistiller.flow import FlowSchedule


class MicroBatches:
    """Training data of this rank by update and micro-step: a function of the seed, with nothing to resume.

    Updates are counted from 0 over the whole run. A step has one, and where there is a critic also its own.
    """

    def __init__(
        self,
        data: CachedData,
        schedule: FlowSchedule,
        size: BatchSize,
        states: set[str],
        latent: tuple[int, ...],
    ):
        """Serve batches of kinds of states.

        Args:
            states: those that the objective needs, among NOISED, PATH and GENERATED.
            latent: shape CFHW of GENERATED ones.
        """
        self._data, self._schedule, self._size = data, schedule, size
        self._states, self._latent = states, latent

    def batch(self, update: int, micro: int) -> dict[str, Batch]:
        """Return the same samples at each kind of states, all of one expert, which is equal on all ranks."""
        index_B, schedule, batches = self.indices(update, micro), self._schedule, {}
        text_BLD = self._data.text(index_B)
        if NOISED in self._states:
            batches[NOISED] = schedule.noised(self._data.x0(index_B), text_BLD, index_B, update)
        if PATH in self._states:
            batches[PATH] = schedule.on_path(
                self._data.levels(index_B), partial(self._data.states, index_B), text_BLD, index_B, update
            )
        if GENERATED in self._states:
            batches[GENERATED] = schedule.generated(self._latent, text_BLD, index_B, update)
        return batches

    def of_student(self, update: int, micro: int) -> GeneratedBatch:
        """Return the batch from which the student draws samples, for the critic."""
        index_B = self.indices(update, micro)
        return self._schedule.generated(self._latent, self._data.text(index_B), index_B, update)

    def real(self, update: int, micro: int, like: Batch) -> Batch:
        """Return cached latents of the same prompts at the noise levels of `like`."""
        index_B = self.indices(update, micro)
        return self._schedule.noised_as(like, self._data.x0(index_B), index_B, update)

    def indices(self, update: int, micro: int) -> list[int]:
        """Return this rank's global sample indices: consecutive, divided by micro-step and then by rank.

        Ranks that share a sequence have the same.
        """
        size = self._size
        first = update * size.total + (micro * sequence.replicas() + sequence.replica()) * size.micro
        return list(range(first, first + size.micro))

    def items(self, update: int, micro: int) -> list[PromptItem]:
        """Return prompts and media of this rank's samples."""
        return [self._data.item_at(index) for index in self.indices(update, micro)]
