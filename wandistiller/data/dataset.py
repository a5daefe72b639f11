"""Prompts and media by number, for millions of them: only positions in the files are in memory."""

import hashlib
import os
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from wandistiller.data import lines
from wandistiller.tiny import clips, shapes
from wandistiller.tiny.first_frames import ROWS as FIRST_FRAMES
from wandistiller.utils.errors import ConfigError, is_text, readable

EMBEDDED = {
    "tiny": shapes.SEEN,
    "tiny:held_out": shapes.HELD_OUT,
    "tiny-video": clips.SEEN,
    "tiny-video:held_out": clips.HELD_OUT,
}
LONGEST_NAME = 255
"""Characters of a text that may be a file's name."""
SHOWN = 20
"""Greatest number of problems that are listed; the others are counted."""


class MediaType(IntEnum):
    """Type of an item's medium."""

    PROMPT = 0
    IMAGE = 1
    VIDEO = 2
    FIRST_FRAME = 3
    """An image that a clip begins with, which the teacher makes."""
    BOTH_ENDS = 4
    """The same with the image that it ends with."""


WITH_IMAGES = (MediaType.FIRST_FRAME, MediaType.BOTH_ENDS)
"""Types of items with images that a clip begins, and may end, with."""
MADE = (MediaType.PROMPT, *WITH_IMAGES)
"""Types of items whose latents the teacher makes."""


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One line of the data: a prompt and, if given, a medium or the first frame of a clip."""

    prompt: str
    media: Path | None = None
    """What it is a caption of, to learn from."""
    image: Path | None = None
    """The image that a clip begins with, which the teacher makes."""
    last_image: Path | None = None
    """The one that it ends with."""

    @property
    def images(self) -> list[Path]:
        """The images that the clip begins and ends with, if they are given."""
        return [image for image in (self.image, self.last_image) if image]

    @property
    def key(self) -> tuple[str, ...]:
        """Key of random numbers: the prompt and the names of the given images."""
        return self.prompt, *(image.name for image in self.images)

    @property
    def begins_with(self) -> Path | None:
        """The file with the first frame, if there is one."""
        return self.image or self.media


class PromptDataset(Sequence[PromptItem]):
    """The data by number, in the order given, without duplicates."""

    def __init__(
        self,
        read: Callable[[int], PromptItem],
        kinds: Sequence[int],
        hashes: Sequence[int],
        unknown: Sequence[Path] = (),
        thumbnails: int = 0,
    ):
        """Keep the rows that differ.

        Args:
            read: returns the item of a row of the source.
            kinds: `MediaType` of each row.
            hashes: 64-bit hash of each row's content.
            unknown: files that have a prompt beside them and an ending that is not known.
            thumbnails: number of pictures beside videos that were left out.
        """
        self.unknown, self.thumbnails = unknown, thumbnails
        self._read, hashes_N = read, np.asarray(hashes, dtype=np.uint64)
        self._rows = np.sort(np.unique(hashes_N, return_index=True)[1])
        self.duplicates = len(hashes_N) - len(self._rows)
        self.kinds = np.asarray(kinds, dtype=np.uint8)[self._rows]
        """`MediaType` of each item."""
        self.digest = hashlib.blake2b(hashes_N[self._rows].tobytes(), digest_size=8).hexdigest()
        """Hash of all prompts and names of media, not of the media's content."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> PromptItem:
        return self._read(int(self._rows[number]))

    def first(self, *kinds: MediaType) -> PromptItem | None:
        numbers = np.flatnonzero(np.isin(self.kinds, kinds))
        return self[int(numbers[0])] if len(numbers) else None

    @property
    def made(self) -> np.ndarray:
        """True of items whose latents the teacher makes."""
        return np.isin(self.kinds, MADE)

    def spread(self) -> list[PromptItem]:
        """Pick up to 8 items, evenly over the data."""
        return [self[i] for i in range(0, len(self), max(1, len(self) // 8))][:8]

    def samples(self, per_prompt: int) -> int:
        """Return how many samples one epoch has: one of each medium."""
        return int(np.where(self.made, per_prompt, 1).sum())


@readable()
def read_dataset(data_path: str, *, thumbnails: bool = True, first_frames: bool = False) -> PromptDataset:
    """Index the data: a name in EMBEDDED, a .txt of prompts, a .jsonl, a .csv, a .tsv, or a folder.

    In a folder, a .txt with the name of a medium is its prompt; any other .txt has one prompt per line. Blank
    lines and lines that start with # are skipped, and so are hidden files and what systems leave behind.

    Args:
        thumbnails: take pictures that have the name of a video in the same folder.
        first_frames: pictures are first frames of clips that the teacher makes.

    Raises:
        ConfigError: no such file, not UTF-8, a bad line, a missing media file, or no prompt at all.
    """
    path = FIRST_FRAMES.get(data_path, Path(data_path))
    if data_path in EMBEDDED:
        prompts = EMBEDDED[data_path]
        kinds, hashes = [MediaType.PROMPT] * len(prompts), [_hash(p) for p in prompts]
        return PromptDataset(lambda row: PromptItem(prompts[row]), kinds, hashes)
    if not (path.is_dir() or (path.is_file() and path.suffix.lower() in lines.LISTS)):
        why = f"not a {', '.join(lines.LISTS)} or folder" if path.exists() else "no such file or folder"
        remedy = f"Give a .txt with one prompt a line, a folder of media, {lines.ROWS}, or `tiny`."
        raise ConfigError(f"{data_path}: {why}. {remedy}")
    index = _Index(path if path.is_dir() else path.parent, thumbnails, first_frames)
    if path.is_dir():
        index.add_folder()
    else:
        index.add_lines(path.name)
    if index.problems:
        others = index.wrong - len(index.problems)
        raise ConfigError(*index.problems, *([f"{data_path}: {others} more are wrong."] if others else []))
    if not index.hashes:
        known = f"an ending that is not known. Known ones: {', '.join(sorted(lines.MEDIA))}."
        none = f"{data_path}: no prompt in it. Write one prompt a line{lines.tables_in(path)}."
        raise ConfigError(f"{index.unknown[0]}: has a prompt, but {known}" if index.unknown else none)
    return PromptDataset(index.read, index.kinds, index.hashes, index.unknown, index.thumbnails)


class _Index:
    """Position of each item: file, and byte where its line begins; -1 for a medium with its own .txt."""

    def __init__(self, root: Path, takes_thumbnails: bool, first_frames: bool = False):
        self._root, self._takes_thumbnails, self.thumbnails = root, takes_thumbnails, 0
        self._of_image = MediaType.FIRST_FRAME if first_frames else MediaType.IMAGE
        # names of the files, packed: a str for each would take 90 bytes
        self._names, self._ends = bytearray(), array("q", [0])
        self._file, self._offset = array("i"), array("q")
        self.kinds, self.hashes = array("B"), array("Q")
        self._tables: dict[int, lines.Table] = {}
        self.unknown: list[Path] = []
        self.problems: list[str] = []  # the first SHOWN of them; `wrong` counts all
        self.wrong = 0

    def read(self, row: int) -> PromptItem:
        number = self._file[row]
        path = self._root / os.fsdecode(bytes(self._names[self._ends[number] : self._ends[number + 1]]))
        if self._offset[row] < 0:
            return self._item(row, lines.clean(lines.beside(path).read_text(encoding="utf-8-sig")), path)
        reader = self._tables.get(number) or lines.LINES[_ending(path.name)]
        with path.open("rb") as stream:
            _, _, record = next(reader.records(stream, self._offset[row]))
        prompt, names, _ = reader.item(record)
        return self._item(
            row, lines.clean(prompt), *(lines.in_any_form(path.parent / name) for name in names)
        )

    def _item(self, row: int, prompt: str, *media: Path) -> PromptItem:
        if self.kinds[row] not in WITH_IMAGES:
            return PromptItem(prompt, *media[:1])
        return PromptItem(prompt, None, *media)

    def add_folder(self) -> None:
        seen = {os.path.realpath(self._root)}  # links may lead back
        for folder, subfolders, names in os.walk(self._root, followlinks=True):
            inner = {
                os.path.realpath(os.path.join(folder, n)): n
                for n in sorted(subfolders)[::-1]
                if lines.is_data(n)
            }
            subfolders[:] = sorted(name for place, name in inner.items() if place not in seen)
            seen.update(inner)
            inside = os.path.relpath(folder, self._root)
            self._add_names(Path(folder), inside, sorted(filter(lines.is_data, names)))

    def _add_names(self, folder: Path, inside: str, names: list[str]) -> None:
        """Add the files of one folder, whose path in the data is `inside`; `names` are sorted."""
        endings = {os.path.splitext(n)[1] for n in names}
        media = [e for e in endings if e.lower() in lines.MEDIA]
        videos = [e for e in media if e.lower() in lines.VIDEOS]
        unknown = sorted(e for e in endings if e.lower() not in lines.MEDIA | lines.NO_MEDIA)
        composed = {unicodedata.normalize("NFC", n) for n in names}

        def has(stem: str, endings: list[str]) -> bool:
            return any(stem + ending in composed for ending in endings)

        for name in names:
            stem, ending = os.path.splitext(name)
            whole = os.path.normpath(os.path.join(inside, name))
            stem = unicodedata.normalize("NFC", stem)
            if ending in media:
                if not self._takes_thumbnails and ending not in videos and has(stem, videos):
                    self.thumbnails += 1
                else:
                    self._add_medium(whole)
            elif ending.lower() == ".txt" and not has(stem, media):
                unused = [folder / f"{stem}{e}" for e in unknown if has(stem, [e])]
                self.unknown += unused
                if not unused:
                    self.add_lines(whole)

    def _add_medium(self, name: str) -> None:
        media = self._root / name
        text = lines.beside(media)
        if not is_text(name):
            return self._add_problem(f"{media}: its name is not UTF-8. Rename it.")
        if text.is_file() and text.stat().st_size > lines.LONGEST_LINE:
            return self._add_problem(f"{text}: over {lines.LONGEST_LINE} bytes. Write one prompt.")
        try:
            prompt = text.read_text(encoding="utf-8-sig").strip() if text.is_file() else ""
        except UnicodeDecodeError as error:
            return self._add_problem(f"{text}: not UTF-8: {error}. Save it as UTF-8.")
        if not lines.has_prompt(prompt):
            there = lines.tables_in(media.parent)
            return self._add_problem(f"{media}: no prompt. Write it into {text.name} beside it{there}.")
        self._add_file(name)
        self._add(-1, prompt, name)

    def add_lines(self, name: str) -> None:
        path, line = self._root / name, 1
        if not path.is_file():
            what = "no regular file" if path.exists() else "a link to a file that is not there"
            return self._add_problem(f"{path}: is {what}. Take it out, or mend it.")
        self._add_file(name)
        with path.open("rb") as stream:
            try:
                if (ending := _ending(name)) in lines.SEPARATORS:
                    self._tables[len(self._ends) - 2] = lines.Table(stream, ending)
                reader = self._tables.get(len(self._ends) - 2) or lines.LINES[ending]
                offset, line = reader.start, 1 + reader.header_lines
                for end, number, record in reader.records(stream, offset):
                    try:
                        if item := reader.item(record):
                            self._add_checked(offset, *item, path)
                    except ValueError as error:
                        self._add_problem(f"{path}, line {line}: {error}")
                    offset, line = end, line + number
            except ValueError as error:
                is_text = not isinstance(error, UnicodeDecodeError)
                why = error if is_text else f"not UTF-8: {error}. Save it as UTF-8."
                self._add_problem(f"{path}, line {line}: {why}")

    def _add_checked(
        self, offset: int, prompt: str, media: list[str], others: list[tuple[str, str]], path: Path
    ) -> None:
        """Add an item of a list. Raises ValueError with the reason.

        Args:
            others: texts of the row that are not used, with their columns.
        """
        if self._of_image is MediaType.IMAGE:
            media, others = media[:1], others + [(lines.LAST_IMAGE, last) for last in media[1:]]
        if missing := [name for name in media if not lines.in_any_form(path.parent / name).is_file()]:
            why = f"no such file: {path.parent / missing[0]}. Fix the name."
            address = f"{missing[0]} is an address. Fetch the file, and write its name."
            raise ValueError(address if "://" in missing[0] else why)
        for column, text in others:
            is_name = _ending(text) in lines.MEDIA and len(text) <= LONGEST_NAME
            if is_name and lines.in_any_form(path.parent / text).is_file():
                raise ValueError(
                    f"`{column}` names {text}, which is there, but is not used. Rename it to image, "
                    f"video or file, to {lines.LAST_IMAGE} if a clip ends with it, or take it out."
                )
        self._add(offset, prompt, *media)

    def _add_file(self, name: str) -> None:
        self._names += os.fsencode(name)
        self._ends.append(len(self._names))

    def _add(self, offset: int, prompt: str, *media: str) -> None:
        """Add one item of the file that was added last."""
        kind = MediaType.PROMPT
        if media:
            kind = MediaType.BOTH_ENDS if media[1:] else self._of_image
        if media and _ending(media[0]) in lines.VIDEOS:
            kind = MediaType.VIDEO
        self._file.append(len(self._ends) - 2)
        self._offset.append(offset)
        self.kinds.append(kind)
        self.hashes.append(_hash(prompt, *media))

    def _add_problem(self, problem: str) -> None:
        self.wrong += 1
        if self.wrong <= SHOWN:
            self.problems.append(problem)


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _hash(prompt: str, medium: str = "", *last: str) -> int:
    text = "\0".join([prompt, medium, *last]).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
