"""A reader of safetensors that reads only the bytes it needs, and says what else lies in place of a file."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import PARTIAL, in_its_place, read_json

AGAIN = "Fetch this file again, with `hf download`; in a clone, with `git lfs pull`."
PICKLE = (b"PK\x03\x04", b"\x80\x02")
"""Beginnings of what torch.save writes."""
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
SAVED_AGAIN = "If you trust its source, load it with diffusers or transformers and write `save_pretrained`."
NOT_READ = f"pickles (.bin) are not read, as they can run code. {SAVED_AGAIN}"


def unfinished(folder: Path, names: Iterable[str]) -> list[str]:
    """List the files of `folder` among `names` that are links to nothing, or that are still being written."""
    problems = []
    for file in (folder / name for name in names):
        if file.is_symlink() and not file.exists():
            remedy = f"Put that back in its place. {AGAIN}"
            problems.append(f"{file}: it is a link to {os.readlink(file)}, which is not there. {remedy}")
        halves = (file.with_name(file.name + end) for end in PARTIAL)
        text = f"the download of {file.name} is not finished. Let it end, or delete both files. {AGAIN}"
        problems += [f"{half}: {text}" for half in halves if half.exists()]
    return problems


def damage_in(file: Path) -> str | None:
    """Say what a file is that should be safetensors, and how to mend it; None: nothing that is known."""
    with file.open("rb") as opened:
        raw = opened.read(512)
    if raw.startswith(PICKLE):
        return f"it is a pickle of PyTorch under this name, and {NOT_READ}"
    what = in_its_place(raw)
    return what and f"it is {what}. {AGAIN}"


def missing(file: Path) -> str:
    """Say that the weights `file` are missing, and what lies in their folder instead."""
    there = sorted(f.name for f in file.parent.glob("*") if f.name.endswith(SUFFIXES))
    if pickles := [name for name in there if not name.endswith(SUFFIXES[0])]:
        return f"there is no such file, but {pickles[0]}, and {NOT_READ}"
    if there and "-of-" not in file.name:
        return (
            f"there is no such file, but {there[0]}: the index of parts is missing, or the name is another "
            f"than `save_pretrained` writes. {AGAIN} Or load the folder and save it again."
        )
    return f"there is no such file. {AGAIN}"


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DIFFUSERS_STEM = "diffusion_pytorch_model"
CHUNK_BYTES = 2 * 2**20  # read, converted and checked at a time, while it is in the processor's cache
READERS = 4
"""Threads that read the parts of a tensor in CPU memory: one is slower than a disk, or a file in memory."""
NAMED = 5  # tensors named in one message
TOKENIZER = "spiece_model"
NO_WEIGHTS = {("I64", "position_ids"): 8, ("U8", TOKENIZER): 1}
"""Type, end of the name and bytes of an element of tensors that are none: the numbers 0, 1, ... that
transformers before 4.31 stored with CLIP, and the tokenizer in ComfyUI's text encoder."""
RENAMED = "renamed"
"""Key of an index's metadata where files have names of others: the name here -> the name in the file."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Position of one tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: torch.Size
    begin: int
    """Bytes from the start of the file."""
    name: str
    """Its name in the file."""


class WeightReader:
    """The tensors of one transformer folder, whether it is one safetensors file or sharded.

    Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data).
    """

    def __init__(self, folder: Path, stem: str = DIFFUSERS_STEM):
        """Read the headers, no data.

        Args:
            stem: beginning of the file names; transformers' is `model`.
        Raises:
            ConfigError: files are missing, truncated, or not safetensors.
        """
        self.folder = folder
        self.faults: list[str] = []
        """Unreadable bytes and non-finite numbers in what was read; for `gather_problems` after loading."""
        self._scratch = torch.empty(READERS, CHUNK_BYTES, dtype=torch.uint8)  # no memory until written to
        self._readers = ThreadPoolExecutor(READERS, "weights")  # no thread until a tensor has several parts
        self.read_names: set[str] = set()
        """Tensors of which anything was read."""
        self.nonzero: set[str] = set()
        """Those of them in which a number other than 0 was seen."""
        self.stored: dict[str, Stored] = {}
        index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
        # of both, transformers 5 takes the single file and diffusers 0.42 the index
        is_sharded = index.is_file() and not (stem != DIFFUSERS_STEM and single.is_file())
        weight_map = _weight_map(index) if is_sharded else {}
        files = sorted({folder / name for name in weight_map.values()} or {single})
        if problems := unfinished(folder, [index.name, *(file.name for file in files)]):
            raise ConfigError(*problems)
        headers: dict[str, dict[str, Stored]] = {}
        for file in files:
            try:
                headers[file.name] = read_header(file) if file.is_file() else {}
            except ValueError as error:
                problems.append(f"{file}: {damage_in(file) or f'{error} {AGAIN}'}")
            if not file.is_file():
                problems.append(f"{file}: {missing(file)}")
        if problems := problems or _index_problems(index, weight_map, headers):
            raise ConfigError(*problems)
        for file, header in headers.items():  # of a tensor in two files, the one that the index names
            self.stored |= {name: t for name, t in header.items() if weight_map.get(name, file) == file}
        if renamed := read_json(index)["metadata"].get(RENAMED) if weight_map else None:
            stored = {name: self.stored[in_file] for name, in_file in renamed.items()}
            self.stored = {name: replace(t, file=t.file.resolve()) for name, t in stored.items()}

    def problems(
        self, expected: dict[str, torch.Size], ignored: Iterable[str] | None, of: str = "config.json"
    ) -> list[str]:
        """List the tensors that are missing, unexpected, or of another shape than the model `of` that has."""
        missing, extra = expected.keys() - self.stored.keys(), self.stored.keys() - expected.keys()
        extra = {name for name in extra if not any(part in name for part in ignored or ())}
        problems = []
        for what, names in (("missing", missing), ("not known to this model", extra)):
            if names:
                shown = ", ".join(f"`{n}`" for n in sorted(names)[:NAMED])
                others = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                problems.append(
                    f"{self.folder}: {len(names)} tensor(s) {what}: {shown}{others}. Its weights and {of} do "
                    "not belong together, or they are of a wrapped model, of which the network itself must "
                    "be saved. Fetch the folder again."
                )
        for name in sorted(expected.keys() & self.stored.keys()):
            stored, shape = self.stored[name], expected[name]
            if stored.shape != shape:
                shapes = f"has the shape {list(stored.shape)}; {of} asks for {list(shape)}"
                problems.append(f"{stored.file}: tensor `{name}` {shapes}. Fetch the folder again.")
        return problems

    def state(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read all tensors as they are stored, or converted; raise ConfigError with what is wrong in them."""
        state = {name: torch.empty(t.shape, dtype=dtype or t.dtype) for name, t in self.stored.items()}
        for name, value in state.items():
            self.read(name, value)
        if self.faults:
            raise ConfigError(*self.faults)
        return state

    def read(self, name: str, out: Tensor, first: int = 0) -> None:
        """Fill `out` with the elements from `first` on of a tensor's row-major order, converted to its dtype.

        Elements past the tensor's end are left alone. Problems go to `faults`, as other ranks go on
        loading.
        """
        stored = self.stored[name]
        out_N = out.detach().view(-1)[: max(0, stored.shape.numel() - first)]
        size = max(CHUNK_BYTES // stored.dtype.itemsize, -(-len(out_N) // READERS))
        on_cpu = out.device.type == "cpu"  # else in this thread's stream
        parts_N = out_N.split(size) if on_cpu and len(out_N) else [out_N]
        each = self._readers.map if len(parts_N) > 1 else map
        starts = range(first, first + max(1, len(out_N)), size)
        faults = each(partial(self._fill, name), parts_N, starts, self._scratch)
        self.faults += dict.fromkeys(fault for fault in chain(*faults) if fault not in self.faults)

    def _fill(self, name: str, out_N: Tensor, first: int, scratch: Tensor) -> set[str]:
        """Fill one part, through `scratch` where it is converted; return the problems of what was read."""
        stored, faults = self.stored[name], set()
        direct = out_N.device.type == "cpu" and out_N.dtype == stored.dtype
        step = CHUNK_BYTES // stored.dtype.itemsize
        try:
            with stored.file.open("rb", buffering=0) as file:  # no more than is needed
                file.seek(stored.begin + first * stored.dtype.itemsize)
                for chunk_N in out_N.split(step) if len(out_N) else ():
                    nbytes = len(chunk_N) * stored.dtype.itemsize
                    raw_N = chunk_N if direct else scratch[:nbytes].view(stored.dtype)
                    raw = memoryview(raw_N.view(torch.uint8).numpy())
                    while len(raw):
                        if not (n := file.readinto(raw)):
                            raise EOFError("the file ends inside it")
                        raw = raw[n:]
                    if not direct:
                        chunk_N.copy_(raw_N)
                    faults |= self._not_finite(name, chunk_N)
        except (OSError, EOFError) as error:
            faults.add(f"{stored.file}: tensor `{name}` could not be read: {error}. Fetch this file again.")
        return faults

    def _not_finite(self, name: str, chunk_N: Tensor) -> set[str]:
        low, high = chunk_N.aminmax()
        self.read_names.add(name)
        if not low == high == 0:
            self.nonzero.add(name)
        if low.isfinite() and high.isfinite():
            return set()
        dtype = str(chunk_N.dtype).removeprefix("torch.")
        return {
            f"{self.stored[name].file}: tensor `{name}` holds numbers that are not finite in {dtype}. "
            "Fetch this file again, or choose another precision."
        }


def _weight_map(index: Path) -> dict[str, str]:
    """File name by tensor."""
    names = read_json(index).get("weight_map")
    files = names.values() if isinstance(names, dict) else ()
    if not files or not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ConfigError(f"{index}: `weight_map` must name a file of its folder for each tensor. {AGAIN}")
    return names


def _index_problems(
    index: Path, weight_map: dict[str, str], headers: dict[str, dict[str, Stored]]
) -> list[str]:
    """List where an index and the headers of its files, by their names, differ."""
    if not weight_map:
        return []
    if not isinstance(read_json(index).get("metadata"), dict):
        remedy = 'Write "metadata": {} into it; diffusers and transformers read no index without.'
        return [f"{index}: `metadata` is missing, or no object. {remedy}"]
    lost = [(name, file) for name, file in weight_map.items() if name not in headers[file]]
    problems = [
        f"{index}: it lists `{name}` in {file}, which lacks it. {AGAIN}" for name, file in lost[:NAMED]
    ]
    stored = {name for header in headers.values() for name in header}
    if not problems and (number := len(stored - weight_map.keys())):
        names = f"it names {len(stored) - number} of the {len(stored)} tensors in its files"
        problems.append(f"{index}: {names}. {AGAIN}")
    return problems


def read_header(file: Path) -> dict[str, Stored]:
    """Read the position of every tensor of a safetensors file; ValueError if it is not whole."""
    try:
        with safe_open(file, "np") as opened:  # it checks the header, and that the tensors fill the file
            tensors = {name: opened.get_slice(name) for name in opened.offset_keys()}
            entries = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"it is no whole safetensors file: {error}.") from None
    with file.open("rb") as opened:
        begin = 8 + int.from_bytes(opened.read(8), "little")
    stored: dict[str, Stored] = {}
    for name, (dtype, shape) in entries.items():
        if nbytes := NO_WEIGHTS.get((dtype, name.rpartition(".")[2])):
            begin += nbytes * prod(shape)
            continue
        if dtype not in DTYPES:
            raise ValueError(f"it holds numbers of type {dtype}; known are {', '.join(DTYPES)}.")
        stored[name] = Stored(file, DTYPES[dtype], torch.Size(shape), begin, name)
        begin += prod(shape) * DTYPES[dtype].itemsize
    return stored
