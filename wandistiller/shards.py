"""Tensors on disk by key, many to a file. A key says what its tensors are, so every run that wants them finds them."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller import distributed
from wandistiller.files import atomic, digest


class Shards:
    """The safetensors files of one folder. A tensor is named `KEY.NAME`; the header says for people what a key is."""

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
            with safe_open(file, "pt") as opened:
                found |= {k: file for name in opened.keys() if (k := name.partition(".")[0]) in wanted}
        return found

    def write(self, tensors: dict[str, dict[str, Tensor]], about: dict[str, str]) -> None:
        """Write one file.

        Args:
            tensors: key -> name -> tensor.
            about: key -> what it is, for people.
        """
        flat = {f"{key}.{name}": t.cpu().contiguous() for key, named in tensors.items() for name, t in named.items()}
        with atomic(self._folder / f"{digest(sorted(tensors))}.safetensors") as temporary:
            save_file(flat, temporary, metadata=about)

    def read(self, key: str, *names: str) -> list[Tensor]:
        """The tensors of one key."""
        with safe_open(self._place[key], "pt") as opened:
            return [opened.get_tensor(f"{key}.{name}") for name in names]
