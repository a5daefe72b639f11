"""Safetensors files written as their tensors come, with a checksum, and read a slice at a time."""

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
CHUNK_BYTES = 16 * 2**20


class Stamp(NamedTuple):
    """What a file must be to be the one that was written."""

    bytes: int
    crc32: str
    """8 hex digits."""


class Spec(NamedTuple):
    """A tensor to come, flat."""

    name: str
    dtype: torch.dtype
    numel: int


def write_stream(path: Path, specs: list[Spec], tensors: Iterable[Tensor]) -> Stamp:
    """Write flat tensors one after the other, from any device, without a second copy of all of them.

    safetensors' own save_file (0.8) copies every tensor to bytes first. Format: huggingface.co/docs/safetensors.

    Args:
        tensors: in the order of `specs`; each is used only until the next is asked for.
    """
    header, end = {}, 0
    for spec in specs:
        begin, end = end, end + spec.numel * spec.dtype.itemsize
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": [spec.numel], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc = 0
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text):
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        for spec, tensor in zip(specs, tensors, strict=True):
            raw = memoryview(tensor.detach().to("cpu", spec.dtype).contiguous().view(torch.uint8).numpy())
            crc = zlib.crc32(raw, crc)
            file.write(raw)
    return Stamp(8 + len(text) + end, f"{crc:08x}")


def stamp_of(path: Path) -> Stamp:
    """Of the file as it can be read now."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return Stamp(size, f"{crc:08x}")


def flush(path: Path) -> None:
    """Have a file or the names in a folder on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Piece(NamedTuple):
    """Consecutive elements of one tensor, in one of several files."""

    start: int
    numel: int
    file: int
    name: str


class Pieces:
    """Tensors that lie in pieces in several files, whoever wrote them; a piece is named `KIND/START/NAME`."""

    def __init__(self, files: Iterable[Path]):
        """Read the headers."""
        self._files = [safe_open(file, "pt") for file in files]
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        for number, file in enumerate(self._files):
            for full in file.keys():
                kind, start, name = full.split("/", 2)
                numel = file.get_slice(full).get_shape()[0]
                self._pieces.setdefault((kind, name), []).append(Piece(int(start), numel, number, full))
        for pieces in self._pieces.values():
            pieces.sort()

    def names(self, kind: str) -> list[str]:
        """Of the tensors that are there in this kind."""
        return [name for of, name in self._pieces if of == kind]

    def kinds(self) -> list[str]:
        return list(dict.fromkeys(kind for kind, _ in self._pieces))

    def read(self, kind: str, name: str, start: int = 0, numel: int | None = None) -> Tensor:
        """`numel` elements from `start` on, flat, on the CPU; all, if left out."""
        found, place = [], start
        for piece in self._pieces[kind, name]:
            stop = piece.start + piece.numel if numel is None else min(piece.start + piece.numel, start + numel)
            if piece.start <= place < stop:
                found.append(self._files[piece.file].get_slice(piece.name)[place - piece.start : stop - piece.start])
                place = stop
        if numel is not None and place != start + numel:
            raise ValueError(f"{kind} of {name}: elements from {place} on are in no file.")
        return found[0] if len(found) == 1 else torch.cat(found)


def piece_name(kind: str, name: str, start: int) -> str:
    """What a piece is called in its file."""
    return f"{kind}/{start}/{name}"
