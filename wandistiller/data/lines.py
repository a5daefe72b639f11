"""Lines and records of prompt files: text, JSON lines, and tables with a header (.csv, .tsv)."""

import csv
import html
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ftfy

from wandistiller.utils.errors import problem
from wandistiller.utils.files import PARTIAL

LONGEST_LINE = 2**16
"""Bytes; only the first 512 tokens of a prompt are used."""
SEPARATORS = {".csv": ",;\t", ".tsv": "\t,;"}
"""Characters between the fields of a table, by its ending, most usual first; its header decides."""
LISTS = (".txt", ".jsonl", *SEPARATORS)
IMAGES = set(".png .jpg .jpeg .jpe .jfif .webp .bmp .tif .tiff .avif .jp2 .tga .ppm .pgm".split())
VIDEOS = set(".mp4 .m4v .mov .webm .mkv .avi .mpg .mpeg .ts .mts .m2ts .wmv .flv .ogv .3gp .gif".split())
MEDIA = IMAGES | VIDEOS
NO_MEDIA = {"", *LISTS, *".json .yaml .yml .toml .xml .html .md .rst .log .py .sh .bak .npz .pt".split()}
"""Endings of files that may lie beside a list of prompts of the same name."""
PROMPT_COLUMNS = ("prompt", "caption", "text", "description")
"""Names of columns, and of keys in JSON lines; in a row the first that is filled."""
MEDIA_COLUMNS = "image video media file path file_name file_path image_path video_path media_path".split()
"""The same for media, of which a row has one: those that datasets and trainers write."""
LAST_IMAGE = "last_image"
"""The column of the image that a clip ends with, beside that of the one that it begins with."""
USED_COLUMNS = {*PROMPT_COLUMNS, *MEDIA_COLUMNS, LAST_IMAGE}
LEFT_OUT = set(
    """__MACOSX @eaDir @Recycle #recycle #snapshot $RECYCLE.BIN lost+found
    Thumbs.db ehthumbs.db desktop.ini""".lower().split()
) | {"system volume information"}
"""Files and folders that systems leave behind, in small letters; so are those that begin with a dot or ~$."""


def clean(prompt: str) -> str:
    """Clean a prompt as WanPipeline does before the tokenizer."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()).strip()


def has_prompt(text: str) -> bool:
    """Return whether cleaning leaves anything to see; mostly without ftfy, which takes 17 us a line."""
    if re.search("[0-9A-Za-z\u3041-\u3163\u3165-\ud7af]", text) and "&" not in text and text.isprintable():
        return True
    return any(unicodedata.category(c) not in ("Cc", "Cf", "Zs", "Zl", "Zp") for c in clean(text))


def prompt_problems(where: str, key: str, prompts: list[str], *, none: bool = False) -> list[str]:
    """List the prompts in which cleaning leaves nothing to see; "" only unless it is allowed as `none`."""
    remedy = "Write some text" + (', or "" for none.' if none else ".")
    blank = [prompt for prompt in prompts if not has_prompt(prompt) and not (none and prompt == "")]
    return [problem(where, key, prompt, remedy) for prompt in blank]


def is_data(name: str) -> bool:
    """Return whether a file or folder of this name is a user's, neither hidden nor left behind."""
    small = name.lower()
    return not (name.startswith((".", "~$")) or small in LEFT_OUT or small.endswith(PARTIAL))


ROWS = 'a .jsonl of rows such as {"prompt": "...", "video": "a.mp4"}'
Item = tuple[str, list[str], list[tuple[str, str]]]
"""Prompt, names of medium and last image if there are, and other texts of a record, with columns or keys."""


class TextLines:
    """The lines of a .txt, each a prompt, but for blank ones and those that begin with #."""

    start = header_lines = 0
    """Bytes and lines before the first record."""

    def records(self, stream: BinaryIO, start: int) -> Iterator[tuple[int, int, str]]:
        """Yield the byte after a record, its number of lines, and its content.

        Raises:
            ValueError: with the reason; a record is too long, is several lines, or not UTF-8.
        """
        end = start
        stream.seek(start)
        # by b"\n": JSON strings may hold other characters that end a line for Python
        for raw in iter(lambda: stream.readline(LONGEST_LINE + 1), b""):
            if len(raw) > LONGEST_LINE:
                raise ValueError(f"over {LONGEST_LINE} bytes. Write one prompt a line.")
            line = raw.decode("utf-8" if end else "utf-8-sig").strip()
            if " " not in line and Path(line).suffix.lower() in MEDIA:
                raise ValueError(f"{line} is the name of a file, where a prompt should be. Write {ROWS}.")
            end += len(raw)
            yield end, 1, "" if line.startswith("#") else line

    def item(self, line: str) -> Item | None:
        """Return what a record says; None if that is nothing."""
        return (line, [], []) if has_prompt(line) else None


class JsonLines(TextLines):
    """The lines of a .jsonl, each an object."""

    def item(self, line: str) -> Item | None:
        """Return what a line says; None if it is blank. Raises ValueError with the reason."""
        if not line:
            return None
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}. Write one object a line.") from None
        row = [(k.strip().lower(), value) for k, value in entry.items()] if isinstance(entry, dict) else []
        remedy = 'Write {"prompt": "...", "image": "file.png"}, or "video", or neither of them.'
        return _item(row, f"no prompt. {remedy}")


class Table:
    """The records of a .csv or .tsv after its header; a field may have several lines."""

    def __init__(self, stream: BinaryIO, ending: str):
        """Read the header. Raises ValueError with the reason."""
        header = stream.readline(LONGEST_LINE)
        self._separator = max(SEPARATORS[ending], key=lambda mark: header.count(mark.encode()))
        self.start, self.header_lines, header = next(self.records(stream, 0), (0, 0, []))
        self._names = [name.strip().lower() for name in header]
        used = [name for name in self._names if name in USED_COLUMNS]
        if not {*PROMPT_COLUMNS} & {*used}:
            raise ValueError(
                f"no column {', '.join(PROMPT_COLUMNS[:-1])} or {PROMPT_COLUMNS[-1]}. Begin with a header "
                "such as prompt,file, or write one prompt a line into a .txt."
            )
        if twice := [name for name in used if used.count(name) > 1]:
            raise ValueError(f"two columns `{twice[0]}`. Keep one.")

    def records(self, stream: BinaryIO, start: int) -> Iterator[tuple[int, int, list[str]]]:
        """Yield the byte after a record, its number of lines, and its fields.

        Raises:
            ValueError: with the reason; a record is too long, not UTF-8, or its quotes do not match.
        """
        end = begun = start
        lines = 0

        def numbered() -> Iterator[str]:
            nonlocal end, lines
            for raw in iter(lambda: stream.readline(LONGEST_LINE + 1), b""):
                encoding = "utf-8" if end else "utf-8-sig"
                end, lines = end + len(raw), lines + 1
                if end - begun > LONGEST_LINE:
                    raise ValueError(
                        f"over {LONGEST_LINE} bytes. Write one prompt a record; close its quotes."
                    )
                yield raw.decode(encoding)

        stream.seek(start)
        try:
            for fields in csv.reader(numbered(), delimiter=self._separator, strict=True):
                yield end, lines, fields
                begun, lines = end, 0
        except csv.Error as error:
            raise ValueError(f"not valid CSV: {error}. Close quotes, and double those within.") from None

    def item(self, fields: list[str]) -> Item | None:
        """Return what a record says; None if it is blank. Raises ValueError with the reason."""
        number, columns = len(fields), len(self._names)
        texts = [field.strip() for field in fields]
        if any(texts[columns:]):
            raise ValueError(
                f"{number} fields, but the header has {columns}. Put a text with commas or tabs in double "
                "quotes, or add the column's name."
            )
        row = list(zip(self._names, texts, strict=False))
        return _item(row, "no prompt. Fill its column, or take the line out.") if any(texts) else None


def _item(row: list[tuple[str, Any]], without_prompt: str) -> Item:
    """Return what a row says, by column; ValueError with the reason, which may be `without_prompt`."""
    values = dict(row)
    prompts = (values.get(key) for key in PROMPT_COLUMNS)
    prompt = next((text for text in prompts if isinstance(text, str) and has_prompt(text)), None)
    if prompt is None:
        raise ValueError(without_prompt)
    media = [(key, name) for key, name in values.items() if key in MEDIA_COLUMNS and name not in (None, "")]
    media.sort(key=lambda named: MEDIA_COLUMNS.index(named[0]))
    last = [(LAST_IMAGE, values[LAST_IMAGE])] if values.get(LAST_IMAGE) else []
    if wrong := [key for key, name in media + last if not isinstance(name, str)]:
        raise ValueError(f"`{wrong[0]}` is no text. Write the name of one file.")
    if len(media) > 1:
        first, second = (f"`{column}` is {name}" for column, name in media[:2])
        raise ValueError(f"two media: {first}, {second}. Keep one of them.")
    others = [(key, text) for key, value in row if key not in USED_COLUMNS for text in _texts(value)]
    if last and not media:
        raise ValueError(f"`{LAST_IMAGE}` is {last[0][1]}, and there is no first one. Write `image` too.")
    return prompt.strip(), [name for _, name in media[:1] + last], others


def _texts(value: Any) -> list[str]:
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return [text for element in inner for text in _texts(element)]
    return [value] if isinstance(value, str) else []


def tables_in(path: Path) -> str:
    """Return a remedy that names the first table in a folder, if there is one; tables are given by name."""
    tables = sorted(t for t in path.iterdir() if t.suffix.lower() in LISTS[1:]) if path.is_dir() else []
    return f", or give --data_path {tables[0]}" if tables else ""


LINES = {".txt": TextLines(), ".jsonl": JsonLines()}
"""Readers of lists without a header, by the file's ending."""


def beside(media: Path) -> Path:
    """Return the .txt of a medium; its ending may be in capitals, its name in another normal form."""
    names = (media.with_suffix(ending) for ending in (".txt", ".TXT", ".Txt"))
    files = (path for name in names if (path := in_any_form(name)).is_file())
    return next(files, media.with_suffix(".txt"))


def in_any_form(path: Path) -> Path:
    """Return the file of this name; where there is none, that whose name is the same in Unicode's other form.

    Macs write a letter and its accent as two characters, other systems as one.
    """
    if str(path).isascii() or path.exists():
        return path
    folder = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:  # each folder may be of another system
        forms = (part, *(unicodedata.normalize(form, part) for form in ("NFC", "NFD")))
        folder = next((folder / form for form in forms if (folder / form).exists()), None)
        if folder is None:
            return path
    return folder
