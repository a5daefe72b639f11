"""Tensors on disk by key, many to a file. A key says what its tensors are, so every run that wants them finds them."""

import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller import distributed
from wandistiller.files import atomic, digest
from wandistiller.problems import ConfigError

BROKEN = (SafetensorError, OSError, ValueError)
"""What safetensors raises for a file that is none, or no longer one."""


SENT = 2**26
"""Bytes of a file that go from node to node at a time."""


class Shards:
    """The safetensors files of one folder. A tensor is named `KEY.NAME`; the header says for people what a key is.

    The folder is on a disk that all nodes share, or on one of each node, which is then given all that others have made.

    A file that cannot be opened is as good as none: its tensors are made anew. Of one that opens, the bytes read are
    compared with the checksum in its header.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._place: dict[str, Path] = {}
        self._homes: list[int] | None = None
        """The first rank of each node that has a disk of its own for it; empty where all see one folder; None: not yet known."""

    def __contains__(self, key: str) -> bool:
        return key in self._place

    def find(self, keys: Iterable[str]) -> list[str]:
        """Look for keys, once each; returns those that are not there, in the order given. Collective."""
        wanted = dict.fromkeys(k for k in keys if k not in self._place)
        if self._homes is None:
            self._homes = homes(self._folder)
        if wanted and self._homes:
            self._bring_all()
        self._place |= distributed.from_rank_0(self._scan(wanted) if wanted and distributed.rank() == 0 else {})
        return [k for k in wanted if k not in self._place]

    def _bring_all(self) -> None:
        """Copy to each node's disk the files that other nodes have. Collective."""
        files = self._folder.glob("*.safetensors") if distributed.rank() in self._homes else ()
        mine = {file.name: file.stat().st_size for file in files if _opens(file)}
        found = distributed.gather_objects(mine)
        for name in sorted({name for home in self._homes for name in found[home]}):
            sources = [home for home in self._homes if name in found[home]]
            if sources != self._homes:
                self._bring(name, sources[0], found[sources[0]][name], distributed.rank() in {*self._homes} - {*sources})

    def _bring(self, name: str, source: int, nbytes: int, wanted: bool) -> None:
        """Send one file from the rank `source`, which others may want. Collective."""
        with ExitStack() as stack:
            out = stack.enter_context(stack.enter_context(atomic(self._folder / name)).open("wb")) if wanted else None
            file = stack.enter_context((self._folder / name).open("rb")) if distributed.rank() == source else None
            for _ in range(0, nbytes, SENT):
                piece = distributed.from_rank(source, file.read(SENT) if file else None)
                if out:
                    out.write(piece)

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


def _opens(file: Path) -> bool:
    try:
        with safe_open(file, "pt"):
            return True
    except BROKEN:
        return False


def homes(folder: Path) -> list[int]:
    """The first rank of each node, where each has a `folder` of its own; none where all nodes see the same. Collective.

    Raises:
        ConfigError: on all ranks; some nodes see the same, others do not.
    """
    first = distributed.node_peers()[0]
    firsts = sorted(set(distributed.gather_objects(first)))
    if len(firsts) == 1:
        return []
    name, here = distributed.from_rank_0(f".seen_{uuid4().hex}_"), distributed.rank() == first
    if here:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}{first}").touch()
    distributed.barrier()
    seen = distributed.gather_objects([rank for rank in firsts if (folder / f"{name}{rank}").exists()])
    distributed.barrier()
    if here:
        (folder / f"{name}{first}").unlink()
    views = {rank: seen[rank] for rank in firsts}
    if all(view == firsts for view in views.values()):
        return []
    if all(view == [rank] for rank, view in views.items()):
        return firsts
    together = "; ".join(sorted({f"{', '.join(map(str, view))}" for view in views.values()}))
    raise ConfigError(f"{folder}: some nodes see the same folder and others do not. The nodes whose first ranks see each other's "
                      f"files: {together}. Give a --cache_dir that all nodes share, or one that is each node's own.")  # fmt: skip


def _checksum(tensor: Tensor) -> str:
    """Of kind, shape and bytes."""
    about = f"{tensor.dtype} {list(tensor.shape)}".encode()
    return f"{zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy(), zlib.crc32(about)):08x}"
