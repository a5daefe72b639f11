"""Tensors on disk by key, many to a file. A key says what its tensors are, so every run that wants them finds them."""

import zlib
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller import distributed
from wandistiller.files import atomic, digest
from wandistiller.problems import ConfigError

BROKEN = (SafetensorError, OSError, ValueError)
"""What safetensors raises for a file that is none, or no longer one."""


class Shards:
    """The safetensors files of one folder. A tensor is named `KEY.NAME`; the header says for people what a key is.

    A file that cannot be opened is as good as none: its tensors are made anew. Of one that opens, the bytes read are
    compared with the checksum in its header.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._place: dict[str, Path] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._place

    def find(self, keys: Iterable[str]) -> list[str]:
        """Look for keys, once each; returns those that are not there, in the order given. Collective."""
        wanted = dict.fromkeys(k for k in keys if k not in self._place)
        self._place |= distributed.from_rank_0(self._scan(wanted) if wanted and distributed.rank() == 0 else {})
        return [k for k in wanted if k not in self._place]

    def _scan(self, wanted: dict[str, None]) -> dict[str, Path]:
        found = {}
        for file in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as opened:
                    found |= {k: file for name in opened.keys() if (k := name.partition(".")[0]) in wanted}
            except BROKEN as error:
                distributed.log0("cache     %s is damaged and passed over; what was in it is made anew: %s", file, error)
        return found

    def write(self, tensors: dict[str, dict[str, Tensor]], about: dict[str, str]) -> None:
        """Write one file.

        Args:
            tensors: key -> name -> tensor.
            about: key -> what it is, for people.
        """
        flat = {f"{key}.{name}": t.cpu().contiguous() for key, named in tensors.items() for name, t in named.items()}
        sums = {f"crc32 {name}": _checksum(t) for name, t in flat.items()}
        with atomic(self._folder / f"{digest(sorted(tensors))}.safetensors") as temporary:
            save_file(flat, temporary, metadata=about | sums)

    def read(self, key: str, *names: str) -> list[Tensor]:
        """The tensors of one key.

        Raises:
            ConfigError: the file was damaged, changed or removed since it was written.
        """
        file = self._place[key]
        try:
            with safe_open(file, "pt") as opened:
                sums = opened.metadata() or {}
                found = {name: opened.get_tensor(f"{key}.{name}") for name in names}
        except BROKEN as error:
            raise ConfigError(f"{file}: it was damaged or removed while in use: {error}. Remove it if it is there, and start "
                              "again: what was in it is made anew.") from None  # fmt: skip
        for name, tensor in found.items():
            now = _checksum(tensor)
            if sums.get(f"crc32 {key}.{name}", now) != now:
                raise ConfigError(f"{file}: `{key}.{name}` is not what was written: its checksum is another. Remove the file and "
                                  "start again: what was in it is made anew.")  # fmt: skip
        return list(found.values())


def _checksum(tensor: Tensor) -> str:
    """Of kind, shape and bytes."""
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return f"{zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy(), zlib.crc32(about)):08x}"
