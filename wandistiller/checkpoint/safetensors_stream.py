"""Safetensors files written tensor by tensor, with a checksum, and read in slices."""

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from wandistiller.network.weight_reader import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 16 * 2**20


class FileChecksum(NamedTuple):
    """Size and checksum of a file."""

    bytes: int
    crc32: str
    """8 hex digits."""


class Spec(NamedTuple):
    """A flat tensor to be written."""

    name: str
    dtype: torch.dtype
    numel: int


def write_stream(path: Path, specs: list[Spec], tensors: Iterable[Tensor]) -> FileChecksum:
    """Write flat tensors one by one, from any device, without a copy of them all.

    safetensors' own save_file (0.8) copies every tensor to bytes. Format: huggingface.co/docs/safetensors.

    Args:
        tensors: in the order of `specs`; each may be freed when the next is taken.
    """
    header, end = {}, 0
    for spec in specs:
        begin, end = end, end + spec.numel * spec.dtype.itemsize
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": [spec.numel], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    crc = zlib.crc32(text)
    with path.open("wb") as file, ThreadPoolExecutor(1) as writer:
        file.write(text)
        for spec, tensor in zip(specs, tensors, strict=True):
            raw = memoryview(tensor.detach().to("cpu", spec.dtype).contiguous().view(torch.uint8).numpy())
            written = writer.submit(file.write, raw)  # beside the checksum, which takes as long
            crc = zlib.crc32(raw, crc)
            written.result()
    return FileChecksum(len(text) + end, f"{crc:08x}")


def checksum(path: Path) -> FileChecksum:
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return FileChecksum(size, f"{crc:08x}")


class Piece(NamedTuple):
    """Consecutive elements of one tensor, in one of several files."""

    start: int
    numel: int
    file: int
    name: str


MAPPED = 2**26
"""Bytes that are read before the files are opened anew, which unmaps them: pages read count as memory."""


class ShardedTensors:
    """Tensors in pieces across the ranks' files in a folder; a piece is named `KIND/START/NAME`."""

    def __init__(self, folder: Path):
        self._paths, self._mapped = sorted(folder.glob("rank_*.safetensors")), 0
        self._open()
        self.files = len(self._files)
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for number, file in enumerate(self._files):
            for full in file.keys():
                kind, start, name = full.split("/", 2)
                numel = file.get_slice(full).get_shape()[0]
                self._pieces.setdefault((kind, name), []).append(Piece(int(start), numel, number, full))
        for pieces in self._pieces.values():
            pieces.sort()

    def _open(self) -> None:
        self._files = [safe_open(path, "pt") for path in self._paths]

    def names(self, kind: str) -> list[str]:
        return [name for its_kind, name in self._pieces if its_kind == kind]

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self._pieces))

    def read(self, kind: str, name: str, start: int = 0, numel: int | None = None) -> Tensor:
        """Read `numel` elements from `start` on, all by default; flat, on the CPU.

        The result may be a view of a mapped file, which is memory of this process as long as it is held.
        """
        parts, place = [], start
        if self._mapped > MAPPED:
            self._open()
            self._mapped = 0
        for piece in self._pieces[kind, name]:
            end = piece.start + piece.numel
            stop = end if numel is None else min(end, start + numel)
            if piece.start <= place < stop:
                saved = self._files[piece.file].get_slice(piece.name)
                parts.append(saved[place - piece.start : stop - piece.start])
                place = stop
        if numel is not None and place != start + numel:
            raise ValueError(f"{kind} of {name}: elements from {place} on are in no file.")
        self._mapped += sum(part.nbytes for part in parts)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
