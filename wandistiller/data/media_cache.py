"""Tensors made of media, on disk: the ranks divide the files, and unusable media are listed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import MediaError, Size
from wandistiller.data.tensor_cache import TensorCache
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import batched, own_batches, until_stopped
from wandistiller.utils.errors import ConfigError, Problem
from wandistiller.utils.files import read_json, write_json


@dataclass(frozen=True, slots=True)
class Sample:
    """A training sample: an item at a size. Without media of its own, one of the teacher's rollouts."""

    item: PromptItem
    size: Size
    rollout_index: int = 0
    clip: int = 0
    """Number of the clip, of a video."""


Encode = Callable[[Sample], dict[str, Tensor]]
"""Returns the tensors of a sample by name. Raises MediaError with the reason if its medium cannot be used."""


def of_one_size(keys: list[str], samples: dict[str, Sample], number: int) -> list[list[str]]:
    """Split keys into lists of at most that many, each of samples of one size."""
    by_size: dict[Size, list[str]] = {}
    for key in keys:
        by_size.setdefault(samples[key].size, []).append(key)
    return [part for of_size in by_size.values() for part in batched(of_size, number)]


class MediaCache(TensorCache):
    """Tensors of samples with media, under keys that the owner makes."""

    def __init__(self, folder: Path, unusable: Path, samples_per_file: int):
        """Name the cache's folder, and the file of the reasons why media cannot be used."""
        super().__init__(folder)
        self._unusable, self._samples_per_file = unusable, samples_per_file

    def fill(
        self,
        samples: dict[str, Sample],
        source: Callable[[Sample], Path],
        encoder: Callable[[], Encode],
        name: str,
    ) -> dict[str, Problem]:
        """Encode the media of samples, given by key, that are missing. Collective.

        Args:
            source: the medium of a sample.
            encoder: loads what encodes; called only where there is work.
            name: of the progress.

        Returns:
            File and reason of each sample that cannot be used, by key; equal on all ranks, and stored, unless
            the next run may be able to read it.
        """
        known = collectives.broadcast_object(self._known_unusable() if collectives.rank() == 0 else {})
        missing = self.missing_keys(key for key in samples if key not in known)
        files = own_batches(of_one_size(missing, samples, self._samples_per_file))
        unusable: dict[str, str] = {}
        passing: set[str] = set()
        with collectives.raise_on_all_ranks():
            if files:
                encode, progress = encoder(), Progress(name, sum(map(len, files)), "sample")
                for keys in until_stopped(files):
                    found = {key: samples[key] for key in keys}
                    unusable |= self._encode(found, source, encode, progress, passing)
        collectives.raise_if_stop_requested("while encoding media; finished ones are kept")
        of_ranks = collectives.gather_objects((unusable, passing))
        new = {key: why for found, _ in of_ranks for key, why in found.items()}
        lasting = {key: why for key, why in new.items() if not any(key in tried for _, tried in of_ranks)}
        if lasting and collectives.rank() == 0:
            write_json(self._unusable, known | lasting)
        self.find_written(key for key in missing if key not in new)
        return {k: Problem(f"{why}.", source(samples[k])) for k, why in (known | new).items() if k in samples}

    def _known_unusable(self) -> dict[str, str]:
        """Reason by key, from earlier runs; empty if that file is damaged."""
        try:
            return read_json(self._unusable) if self._unusable.is_file() else {}
        except ConfigError as error:
            collectives.log0("cache     damaged and made anew: %s", error)
            return {}

    def _encode(
        self,
        samples: dict[str, Sample],
        source: Callable[[Sample], Path],
        encode: Encode,
        progress: Progress,
        passing: set[str],
    ) -> dict[str, str]:
        """Write one file of samples of one size; return the reason, by key, for those that cannot be used.

        They are encoded one by one, as a video alone takes gigabytes.

        Args:
            passing: gets the keys of those that the next run may be able to read.
        """
        tensors, unusable = {}, {}
        for key, sample in until_stopped(samples.items()):
            try:
                tensors[key] = encode(sample)
            except MediaError as error:
                unusable[key] = str(error)
                passing |= {key} if error.passing else set()
            progress.advance()
        if tensors:
            self.write(tensors, {key: str(source(samples[key])) for key in tensors})
        return unusable
