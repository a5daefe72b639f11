"""States from which the samples of the student's next update go on, and their place in a checkpoint."""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from wandistiller.checkpoint.loading import CARRIED
from wandistiller.checkpoint.safetensors_stream import ShardedTensors
from wandistiller.config.job import Job
from wandistiller.data.cached_dataset import MicroBatches
from wandistiller.distributed import collectives
from wandistiller.distributed.sequence_parallel import Ranks


class Carried:
    """The states of this rank's samples, float32, in CPU memory; none where samples begin anew."""

    def __init__(self, job: Job, batches: MicroBatches, ranks: Ranks):
        self._job, self._batches, self._ranks = job, batches, ranks
        self._states: list[Tensor] = []

    def of(self, micro: int) -> Tensor | None:
        """Return the states of a micro-step's samples, x_BCFHW, if they go on."""
        return self._states[micro] if self._states else None

    def put(self, states: Sequence[Tensor | None]) -> None:
        """Take the states of an update by micro-step; None, and no states, let samples begin anew."""
        self._states = [x_BCFHW.cpu() for x_BCFHW in states if x_BCFHW is not None]

    def stored(self) -> dict[int, Tensor]:
        """Return the states that this rank stores, by the number of their first sample in an update."""
        if self._ranks.place:  # of ranks that share a sample the first has it
            return {}
        numbers = (self._batches.indices(0, micro)[0] for micro in range(len(self._states)))
        return dict(zip(numbers, self._states, strict=True))

    def resume(self, folder: Path, changed: set[str]) -> None:
        """Go on from the states of a checkpoint, whatever ranks have written them.

        Args:
            changed: keys of the run's identity that differ from the checkpoint's: samples begin anew then.
        """
        if not (folder / CARRIED).is_dir():
            return
        if changed:
            why = ", ".join(sorted(changed))
            collectives.log0("carried   samples begin from noise: the checkpoint has another %s", why)
            return
        pieces, replicas = ShardedTensors(folder / CARRIED), self._ranks.replicas
        if pieces.files != replicas:
            collectives.log0("carried   samples of %d ranks go on in %d", pieces.files, replicas)
        shape = self._job.batch.micro, *self._batches.latent
        for micro in range(self._job.batch.accumulation):
            first = self._batches.indices(0, micro)[0] * math.prod(self._batches.latent)
            x_BCFHW = pieces.read(CARRIED, "x", first, math.prod(shape)).view(shape).clone()
            self._states.append(x_BCFHW)
