"""Tensors on disk, so that a run that needs the same does not compute them again; tensors made of media."""

import hashlib
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.data.dataset import PromptItem
from wandistiller.data.media import MediaError, Size
from wandistiller.distributed import collectives
from wandistiller.distributed.progress import Progress
from wandistiller.distributed.round_robin import batched, own_batches, until_stopped
from wandistiller.utils.errors import ConfigError, Problem, StorageError
from wandistiller.utils.files import atomic, digest, read_json, write_json

BROKEN = (SafetensorError, OSError, ValueError)
"""Exceptions of safetensors for a file that is damaged or of another format."""


class TensorCache:
    """The safetensors files of one folder. Tensors are named `KEY.NAME`; the header describes each key.

    The folder is on a disk that all nodes share, or each node has a complete copy.

    A file that cannot be opened is ignored and its tensors are made again. Bytes that are read are compared
    with the checksum in the header.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._place: dict[str, Path] = {}
        self._shared: bool | None = None
        """True if all nodes see one folder; None before the first call of `missing_keys`."""

    def __contains__(self, key: str) -> bool:
        return key in self._place

    def missing_keys(self, keys: Iterable[str]) -> list[str]:
        """Look for keys, once each; return the missing ones in the order given. Collective.

        Raises:
            ConfigError: on all ranks; keys are missing, and the nodes do not share the folder; or they do,
                and look for other keys in it.
        """
        requested = dict.fromkeys(k for k in keys if k not in self._place)
        if self._shared is None:
            self._shared = is_shared(self._folder)
        if self._shared:
            if len(set(collectives.gather_objects(digest(*requested)))) > 1:  # by which they divide the work
                raise ConfigError(
                    f"{self._folder}: the ranks look for other entries in it: the media of `data_path` "
                    "differ in time or size between the nodes, or one changed while the run started. Share "
                    "one folder of them, or copy it with its times (`cp -p`, `rsync -t`), and start again."
                )
            place = self._scan(requested) if requested and collectives.rank() == 0 else {}
            self._place |= collectives.broadcast_object(place)
        else:
            with collectives.raise_on_all_ranks():
                self._place |= self._scan(requested)
                if missing := [k for k in requested if k not in self._place]:
                    raise ConfigError(
                        f"{self._folder}: {len(missing)} of {len(requested)} entries are missing on "
                        f"{gethostname()}, and not all nodes see this folder. Give a --cache_dir that all "
                        "nodes share, or run `wandistiller prepare` with this recipe on each node by "
                        "itself first."
                    )
        return [k for k in requested if k not in self._place]

    def find_written(self, keys: Iterable[str]) -> None:
        """Look for keys that ranks have just written. Collective.

        Raises:
            StorageError: on all ranks; some are not there.
        """
        keys = list(keys)
        if lost := self.missing_keys(keys):
            raise StorageError(
                f"{self._folder}: {len(lost)} of {len(keys)} entries are gone since they were written, or "
                "cannot be read. The same command makes them again."
            )

    def _scan(self, requested: dict[str, None]) -> dict[str, Path]:
        place = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as opened:
                    place |= {k: file for name in opened.keys() if (k := name.partition(".")[0]) in requested}
            except BROKEN as error:
                text = "cache     %s is damaged and ignored; its tensors are made again: %s"
                collectives.log0(text, file, error)
        return place

    def write(self, tensors: dict[str, dict[str, Tensor]], about: dict[str, str]) -> None:
        """Write one file of tensors by key and name; `about` describes each key, for people."""
        flat = {
            f"{key}.{name}": t.cpu().contiguous()
            for key, named in tensors.items()
            for name, t in named.items()
        }
        sums = {f"crc32 {name}": _checksum(t) for name, t in flat.items()}
        with atomic(self._folder / f"{digest(sorted(tensors))}.safetensors") as temporary:
            save_file(flat, temporary, metadata=about | sums)

    def read(self, key: str, *names: str) -> list[Tensor]:
        """Read tensors of one key.

        Raises:
            StorageError: the file was damaged, changed or removed since it was written.
        """
        file = self._place[key]
        try:
            with safe_open(file, "pt") as opened:
                sums = opened.metadata() or {}
                tensors = {name: opened.get_tensor(f"{key}.{name}") for name in names}
            for name, tensor in tensors.items():
                checksum = _checksum(tensor)
                if sums.get(f"crc32 {key}.{name}", checksum) != checksum:
                    raise ValueError(f"`{key}.{name}` does not have the checksum in the file's header")
        except BROKEN as error:
            raise StorageError(
                f"{file}: damaged or removed while in use: {error}. Remove it if it is there and start "
                "again; its tensors are made again."
            ) from None
        return list(tensors.values())


def is_shared(folder: Path) -> bool:
    """Return whether all nodes see one folder: rank 0 makes a file in it that all look for. Collective.

    All make the folder: a client of NFS remembers for half a minute that it was not there, until it makes it.
    """
    if len(collectives.node_peers()) == collectives.world_size():
        return True
    marker = folder / collectives.broadcast_object(f".seen_{uuid4().hex}")
    if collectives.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    collectives.barrier()
    with suppress(OSError):  # where it may not, it is not there
        folder.mkdir(parents=True, exist_ok=True)
    seen = collectives.gather_objects(marker.is_file())
    marker.unlink(missing_ok=True)
    return all(seen)


def _checksum(tensor: Tensor) -> str:
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return f"{zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy(), zlib.crc32(about)):08x}"


@dataclass(frozen=True, slots=True)
class Sample:
    """A training sample: an item at a size. Without media of its own, one of the teacher's rollouts."""

    item: PromptItem
    size: Size
    rollout_index: int = 0


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
            Problem of each sample that cannot be used, by key; equal on all ranks, and stored, unless the
            next run may be able to read it.
        """
        known = collectives.broadcast_object(self._known_unusable() if collectives.rank() == 0 else {})
        missing = self.missing_keys(key for key in samples if key not in known)
        files = own_batches(of_one_size(missing, samples, self._samples_per_file))
        reasons: dict[str, tuple[str, bool]] = {}
        with collectives.raise_on_all_ranks():
            if files:
                encode, progress = encoder(), Progress(name, sum(map(len, files)), "sample")
                for keys in until_stopped(files):
                    reasons |= self._encode({key: samples[key] for key in keys}, source, encode, progress)
        collectives.raise_if_stop_requested("while encoding media; finished ones are kept")
        new = {key: reason for part in collectives.gather_objects(reasons) for key, reason in part.items()}
        lasting = {key: why for key, (why, passing) in new.items() if not passing}
        if lasting and collectives.rank() == 0:
            write_json(self._unusable, known | lasting)
        self.find_written(key for key in missing if key not in new)
        unusable = known | {key: why for key, (why, _) in new.items()}
        return {k: Problem(f"{why}.", source(samples[k])) for k, why in unusable.items() if k in samples}

    def _known_unusable(self) -> dict[str, str]:
        """Reason by key, from earlier runs; empty if that file is damaged."""
        try:
            return read_json(self._unusable) if self._unusable.is_file() else {}
        except ConfigError as error:
            collectives.log0("cache     damaged and made again: %s", error)
            return {}

    def _encode(
        self,
        samples: dict[str, Sample],
        source: Callable[[Sample], Path],
        encode: Encode,
        progress: Progress,
    ) -> dict[str, tuple[str, bool]]:
        """Write one file of samples of one size, encoded one by one, as a video alone takes gigabytes.

        Returns:
            By key, the reason why one cannot be used, and if the next run may be able to read it.
        """
        tensors, reasons = {}, {}
        for key, sample in until_stopped(samples.items()):
            try:
                tensors[key] = encode(sample)
            except MediaError as error:
                reasons[key] = str(error), error.passing
            progress.advance()
        if tensors:
            self.write(tensors, {key: str(source(samples[key])) for key in tensors})
        return reasons


class Measured:
    """Tensors by name in one folder, a file each; the folder's name covers all that they depend on."""

    def __init__(self, folder: Path | None):
        """Name the folder, or None to keep nothing; nothing is read or written yet."""
        self._folder = folder

    def of(self, name: str, measure: Callable[[], Tensor]) -> Tensor:
        """Return rank 0's result of `measure`, known or new, on the CPU. Collective."""
        known = collectives.broadcast_object(self.read(name) if collectives.rank() == 0 else None)
        if known:
            return known["result"]
        result = collectives.broadcast_object(measure().cpu())
        if collectives.rank() == 0:
            self.write(name, {"result": result})
        return result

    def read(self, name: str) -> dict[str, Tensor]:
        """Read tensors as this rank finds them; {} if there are none, or the file is damaged."""
        if not self._folder:
            return {}
        try:
            with safe_open(self._file(name), "pt") as opened:
                return {key: opened.get_tensor(key).clone() for key in opened.keys()}
        except BROKEN:
            return {}

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self._folder:
            with atomic(self._file(name)) as temporary:
                save_file({key: t.cpu().contiguous() for key, t in tensors.items()}, temporary)

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"


def batches_digest(batches: list[Batch]) -> str:
    """Hash the inputs of a network in `batches`, which results depend on."""
    hashes = []
    for t in (t for b in batches for t in b.tensors()):
        data = t.detach().cpu().contiguous().view(torch.uint8).numpy()
        hashes.append([str(t.dtype), hashlib.blake2b(data, digest_size=8).hexdigest()])
    return digest(*hashes)
