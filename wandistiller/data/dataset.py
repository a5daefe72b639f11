"""Prompts and media by number, for millions of them: only positions in the files are in memory."""

import hashlib
import html
import json
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import ftfy
import numpy as np

from wandistiller.tiny import shapes
from wandistiller.utils.errors import ConfigError, is_text, readable

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
VIDEOS = {".mp4", ".mov", ".webm", ".mkv", ".avi", ".gif"}
EMBEDDED = {"tiny": shapes.seen_prompts, "tiny:held_out": shapes.held_out_prompts}
LONGEST_LINE = 2**16
"""Bytes; only the first 512 tokens of a prompt are used."""
SHOWN = 20
"""Greatest number of problems that are listed; the others are counted."""


class MediaType(IntEnum):
    """Type of an item's medium."""

    PROMPT = 0
    IMAGE = 1
    VIDEO = 2
    GIF = 3
    """A video that Pillow reads."""


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One line of the data: a prompt and, if given, an image or video."""

    prompt: str
    media: Path | None = None


def clean(prompt: str) -> str:
    """Clean a prompt as WanPipeline does before the tokenizer."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()).strip()


def _has_prompt(text: str) -> bool:
    """Return whether anything is left after cleaning; mostly without ftfy, which takes 17 us a line."""
    return bool(
        re.search("[0-9A-Za-z\u3041-\ud7af]", text) and "&" not in text and text.isprintable() or clean(text)
    )


class PromptDataset(Sequence[PromptItem]):
    """The data by number, in the order given, without duplicates."""

    def __init__(self, read: Callable[[int], PromptItem], kinds: Sequence[int], hashes: Sequence[int]):
        """Keep the rows that differ.

        Args:
            read: returns the item of a row of the source.
            kinds: `MediaType` of each row.
            hashes: 64-bit hash of each row's content.
        """
        self._read, hashes_N = read, np.asarray(hashes, dtype=np.uint64)
        self._rows = np.sort(np.unique(hashes_N, return_index=True)[1])
        self.kinds = np.asarray(kinds, dtype=np.uint8)[self._rows]
        """`MediaType` of each item."""
        self.digest = hashlib.blake2b(hashes_N[self._rows].tobytes(), digest_size=8).hexdigest()
        """Hash of all prompts and names of media, not of the media's content."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> PromptItem:
        return self._read(int(self._rows[number]))

    def first(self, *kinds: MediaType) -> PromptItem | None:
        """Return the first item of these kinds."""
        numbers = np.flatnonzero(np.isin(self.kinds, kinds))
        return self[int(numbers[0])] if len(numbers) else None

    def samples(self, per_prompt: int) -> int:
        """Count the samples in one epoch: media once, prompts without media `per_prompt` times."""
        return len(self) + int((self.kinds == MediaType.PROMPT).sum()) * (per_prompt - 1)


@readable()
def read_dataset(data_path: str) -> PromptDataset:
    """Index the data: `tiny`, `tiny:held_out`, a .txt of prompts, a .jsonl, or a folder.

    In a folder, a .txt with the name of a medium is its prompt; any other .txt has one prompt per line. Blank
    lines and lines that start with # are skipped.

    Raises:
        ConfigError: no such file, not UTF-8, a bad line, a missing media file, or no prompt at all.
    """
    path = Path(data_path)
    if data_path in EMBEDDED:
        prompts = EMBEDDED[data_path]()
        kinds, hashes = [MediaType.PROMPT] * len(prompts), [_hash(p) for p in prompts]
        return PromptDataset(lambda row: PromptItem(prompts[row]), kinds, hashes)
    if not path.exists():
        raise ConfigError(
            f"{data_path}: no such file or folder. Give prompts (.txt, .jsonl), a folder of media, or `tiny`."
        )
    if not (path.is_dir() or (path.is_file() and path.suffix in (".txt", ".jsonl"))):
        raise ConfigError(
            f"{data_path}: not a .txt, .jsonl or folder. Write prompts into a .txt, one a line, or give a "
            "folder."
        )
    index = _Index(path if path.is_dir() else path.parent)
    if path.is_dir():
        index.add_folder()
    else:
        index.add_lines(path.name)
    if index.problems:
        more = index.wrong - len(index.problems)
        raise ConfigError(*index.problems, *([f"{data_path}: {more} more are wrong."] if more else []))
    if not index.hashes:
        raise ConfigError(f"{data_path}: no prompt in it. Write one prompt a line.")
    return PromptDataset(index.read, index.kinds, index.hashes)


class _Index:
    """Position of each item: file, and byte where its line begins; -1 for a medium with its own .txt."""

    def __init__(self, root: Path):
        self._root = root
        # names of the files, packed: a str for each would take 90 bytes
        self._names, self._ends = bytearray(), array("q", [0])
        self._file, self._offset = array("i"), array("q")
        self.kinds, self.hashes = array("B"), array("Q")
        self.problems: list[str] = []
        """The first SHOWN of them; `wrong` counts all."""
        self.wrong = 0

    def read(self, row: int) -> PromptItem:
        number = self._file[row]
        path = self._root / os.fsdecode(bytes(self._names[self._ends[number] : self._ends[number + 1]]))
        if self._offset[row] < 0:
            return PromptItem(clean(path.with_suffix(".txt").read_text(encoding="utf-8-sig")), path)
        with path.open("rb") as stream:
            stream.seek(self._offset[row])
            line = stream.readline().decode("utf-8-sig").strip()
        prompt, medium = _parse(line) if path.suffix == ".jsonl" else (line, None)
        return PromptItem(clean(prompt), path.parent / medium if medium else None)

    def add_folder(self) -> None:
        """Add every medium with its .txt, and every line of the other .txt files."""
        for folder, subfolders, names in os.walk(self._root):
            subfolders.sort()
            names.sort()
            endings = {os.path.splitext(n)[1] for n in names}
            media = [e for e in endings if e.lower() in IMAGES | VIDEOS]
            inside = os.path.relpath(folder, self._root)
            for name in names:
                stem, ending = os.path.splitext(name)
                name = os.path.normpath(os.path.join(inside, name))
                if ending in media:
                    self._add_medium(name)
                elif ending == ".txt" and not any(_holds(names, stem + e) for e in media):
                    self.add_lines(name)

    def _add_medium(self, name: str) -> None:
        media = self._root / name
        text = media.with_suffix(".txt")
        if not is_text(name):
            return self._add_problem(f"{media}: its name is not UTF-8. Rename it.")
        if text.is_file() and text.stat().st_size > LONGEST_LINE:
            return self._add_problem(f"{text}: over {LONGEST_LINE} bytes. Write one prompt.")
        try:
            prompt = text.read_text(encoding="utf-8-sig").strip() if text.is_file() else ""
        except UnicodeDecodeError as error:
            return self._add_problem(f"{text}: not UTF-8: {error}. Save it as UTF-8.")
        if not _has_prompt(prompt):
            return self._add_problem(f"{media}: no prompt. Write it into {text.name} beside it.")
        self._add_file(name)
        self._add(-1, prompt, name)

    def add_lines(self, name: str) -> None:
        """Add the items of one .txt or .jsonl."""
        path, offset = self._root / name, 0
        self._add_file(name)
        with path.open("rb") as stream:
            # by b"\n": JSON strings may hold other characters that end a line for Python
            for number, raw in enumerate(iter(lambda: stream.readline(LONGEST_LINE + 1), b""), 1):
                if len(raw) > LONGEST_LINE:
                    return self._add_problem(
                        f"{path}, line {number}: over {LONGEST_LINE} bytes. Write one prompt a line."
                    )
                try:
                    line = raw.decode("utf-8-sig" if offset == 0 else "utf-8").strip()
                    if line and line[0] != "#":
                        self._add_line(offset, line, path)
                except UnicodeDecodeError as error:
                    return self._add_problem(f"{path}, line {number}: not UTF-8: {error}. Save it as UTF-8.")
                except ValueError as error:
                    self._add_problem(f"{path}, line {number}: {error}")
                offset += len(raw)

    def _add_line(self, offset: int, line: str, path: Path) -> None:
        if path.suffix == ".jsonl":
            prompt, medium = _parse(line)
            if medium and not (path.parent / medium).is_file():
                raise ValueError(f"no such file: {path.parent / medium}. Fix the name.")
            self._add(offset, prompt, medium)
        elif _has_prompt(line):
            self._add(offset, line, None)

    def _add_file(self, name: str) -> None:
        self._names += os.fsencode(name)
        self._ends.append(len(self._names))

    def _add(self, offset: int, prompt: str, medium: str | None) -> None:
        """Add one item of the file that was added last."""
        self._file.append(len(self._ends) - 2)
        self._offset.append(offset)
        self.kinds.append(_media_type(medium) if medium else MediaType.PROMPT)
        self.hashes.append(_hash(prompt, medium or ""))

    def _add_problem(self, problem: str) -> None:
        self.wrong += 1
        if self.wrong <= SHOWN:
            self.problems.append(problem)


def _media_type(medium: str) -> MediaType:
    ending = os.path.splitext(medium)[1].lower()
    return MediaType.GIF if ending == ".gif" else MediaType.VIDEO if ending in VIDEOS else MediaType.IMAGE


def _hash(prompt: str, medium: str = "") -> int:
    text = f"{prompt}\0{medium}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _holds(names: list[str], name: str) -> bool:
    """Return whether a sorted list holds `name`; a set would double the memory of a long list."""
    place = bisect_left(names, name)
    return place < len(names) and names[place] == name


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        raise ValueError("a key is given twice")
    return entry


def _parse(line: str) -> tuple[str, str | None]:
    """Return the prompt and the medium's name of one line of a .jsonl. Raises ValueError with the reason."""
    try:
        entry = json.loads(line, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}. Write one object a line.") from None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not _has_prompt(prompt):
        raise ValueError(
            'no prompt. Write {"prompt": "...", "image": "file.png"}; image, video and id may be left out.'
        )
    if unknown := sorted(set(entry) - {"prompt", "image", "video", "id"}):
        raise ValueError(f"unknown key `{unknown[0]}`. Known keys: prompt, image, video, id.")
    names = [entry[k] for k in ("image", "video") if entry.get(k) is not None]
    if len(names) > 1 or any(not isinstance(n, str) for n in names):
        raise ValueError("give one file name, as image or as video.")
    return prompt.strip(), names[0] if names else None
