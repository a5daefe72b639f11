"""Training batches: the samples of each micro-step on this rank, at each kind of states."""

from wandistiller.batch import NOISED, PATH, Batch
from wandistiller.data.cached_dataset import CachedData
from wandistiller.data.dataset import PromptItem
from wandistiller.distributed import collectives
from wandistiller.engine.ds_config import BatchSize
from wandistiller.flow import FlowSchedule


class MicroBatches:
    """Training data of this rank by step and micro-step: a function of the seed, with nothing to resume."""

    def __init__(self, data: CachedData, schedule: FlowSchedule, size: BatchSize, states: set[str]):
        """Serve the `states` that the objective needs: NOISED, PATH or both."""
        self._data, self._schedule, self._size, self._states = data, schedule, size, states

    def batch(self, step: int, micro: int) -> dict[str, Batch]:
        """Return the same samples at each kind of states, all of one expert, which is equal on all ranks."""
        index_B = self.indices(step, micro)
        x0_BCFHW, text_BLD = self._data.batch(index_B)
        batches = {}
        if NOISED in self._states:
            batches[NOISED] = self._schedule.noised(x0_BCFHW, text_BLD, index_B, step)
        if PATH in self._states:
            batches[PATH] = self._schedule.on_path(*self._data.states(index_B), text_BLD, index_B, step)
        return batches

    def indices(self, step: int, micro: int) -> list[int]:
        """Return this rank's global sample indices: consecutive, divided by micro-step and then by rank."""
        world, size = collectives.world_size(), self._size
        first = step * size.total + (micro * world + collectives.rank()) * size.micro
        return list(range(first, first + size.micro))

    def items(self, step: int, micro: int) -> list[PromptItem]:
        """Return prompts and media of this rank's samples."""
        return [self._data.item_at(index) for index in self.indices(step, micro)]
