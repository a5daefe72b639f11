"""Lines and records of prompt files: text, JSON lines, and tables with a header (.csv, .tsv)."""

import csv
import html
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ftfy

from wandistiller.utils.errors import problem
from wandistiller.utils.files import PARTIAL

LONGEST_LINE = 2**16
"""Bytes; only the first 512 tokens of a prompt are used."""
DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}
LISTS = (".txt", ".jsonl", *DIALECTS)
NO_MEDIA = {"", *LISTS, *".json .yaml .yml .toml .xml .html .md .rst .log .py .sh .bak .npz .pt".split()}
"""Endings of files that may lie beside a list of prompts of the same name."""
PROMPT_COLUMNS = ("prompt", "caption", "text", "description")
"""Names of columns, and of keys in JSON lines; in a row the first that is filled."""
MEDIA_COLUMNS = (
    *"filename filepath path img img_path file file_name file_path".split(),
    *(
        kind + end
        for kind in ("media", "image", "video", "clip", "picture")
        for end in ("", "s", "_file", "_name", "_path")
    ),
)
"""The same for media, of which a row has one."""
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


def parse_json(line: str) -> tuple[str, str | None, list[tuple[str, str]]]:
    """Return prompt, medium's name and other texts, with their keys, of one line of a .jsonl.

    Raises:
        ValueError: with the reason.
    """
    try:
        entry = json.loads(line, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}. Write one object a line.") from None
    entry = {key.strip().lower(): value for key, value in entry.items()} if isinstance(entry, dict) else {}
    prompts = [entry.get(key) for key in PROMPT_COLUMNS]
    prompt = next((text for text in prompts if isinstance(text, str) and has_prompt(text)), None)
    if prompt is None:
        raise ValueError(
            'no prompt. Write {"prompt": "...", "image": "file.png"}, or "video", or neither of them.'
        )
    media = [(key, entry[key]) for key in MEDIA_COLUMNS if entry.get(key) not in (None, "")]
    if wrong := [key for key, name in media if not isinstance(name, str)]:
        raise ValueError(f"`{wrong[0]}` is no text. Write the name of one file.")
    used = {*PROMPT_COLUMNS, *MEDIA_COLUMNS}
    others = [(key, text) for key, value in entry.items() if key not in used for text in _texts(value)]
    return prompt.strip(), _one_medium(media), others


def _texts(value: Any) -> list[str]:
    """List the texts in a JSON value."""
    if isinstance(value, list | dict):
        return [
            text for inner in (value.values() if isinstance(value, dict) else value) for text in _texts(inner)
        ]
    return [value] if isinstance(value, str) else []


def _one_medium(media: list[tuple[str, str]]) -> str | None:
    """Return the medium's name of a row, by column; None without any. Raises ValueError with the reason."""
    if len({name for _, name in media}) > 1:
        (one, first), (other, second) = media[0], next(m for m in media if m[1] != media[0][1])
        raise ValueError(f"two media: `{one}` is {first}, `{other}` is {second}. Keep one of them.")
    return media[0][1] if media else None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        raise ValueError("a key is given twice")
    return entry


class Table:
    """A .csv or .tsv: which of its columns have the prompt and the medium's name."""

    def __init__(self, stream: BinaryIO, ending: str):
        """Read the header. Raises ValueError with the reason."""
        self._dialect = DIALECTS[ending]
        self.start, self.header_lines, header = next(self.records(stream, 0, "utf-8-sig"), (0, 0, []))
        self._names = [name.strip().lower() for name in header]
        self._prompts, self._media = (
            [self._names.index(n) for n in columns if n in self._names]
            for columns in (PROMPT_COLUMNS, MEDIA_COLUMNS)
        )
        self._others = sorted(set(range(len(header))) - {*self._prompts, *self._media})
        if not self._prompts:
            raise ValueError(
                f"no column {', '.join(PROMPT_COLUMNS[:-1])} or {PROMPT_COLUMNS[-1]}. Begin with a header "
                "such as prompt,file, or write one prompt a line into a .txt."
            )
        used = [name for name in self._names if name in (*PROMPT_COLUMNS, *MEDIA_COLUMNS)]
        if twice := [name for name in used if used.count(name) > 1]:
            raise ValueError(f"two columns `{twice[0]}`. Keep one.")

    def records(
        self, stream: BinaryIO, start: int, encoding: str = "utf-8"
    ) -> Iterator[tuple[int, int, list[str]]]:
        """Yield the byte after a record, its number of lines, and its fields; a field may have several lines.

        Raises:
            ValueError: with the reason; a record is too long, not UTF-8, or its quotes do not match.
        """
        end = begun = start
        lines = 0

        def numbered() -> Iterator[str]:
            nonlocal end, lines
            for raw in iter(lambda: stream.readline(LONGEST_LINE + 1), b""):
                end, lines = end + len(raw), lines + 1
                if end - begun > LONGEST_LINE:
                    raise ValueError(
                        f"over {LONGEST_LINE} bytes. Write one prompt a record; close its quotes."
                    )
                yield raw.decode(encoding if end == len(raw) else "utf-8")

        stream.seek(start)
        try:
            for fields in csv.reader(numbered(), self._dialect, strict=True):
                yield end, lines, fields
                begun, lines = end, 0
        except csv.Error as error:
            raise ValueError(f"not valid CSV: {error}. Close quotes, and double those within.") from None

    def item(self, fields: list[str]) -> tuple[str, str | None, list[tuple[str, str]]]:
        """Return prompt, medium's name and other texts, with their columns, of a record.

        Raises:
            ValueError: with the reason.
        """
        number, columns = len(fields), len(self._names)
        if number > columns and any(field.strip() for field in fields[columns:]):
            raise ValueError(
                f"{number} fields, but the header has {columns}. Put a text with commas or tabs in double "
                "quotes, or add the column's name."
            )
        prompts = (fields[i].strip() for i in self._prompts if i < number)
        if (prompt := next(filter(has_prompt, prompts), None)) is None:
            raise ValueError("no prompt. Fill its column, or take the line out.")
        names = [(self._names[i], fields[i].strip()) for i in self._media if i < number]
        others = [(self._names[i], fields[i].strip()) for i in self._others if i < number and fields[i]]
        return prompt, _one_medium([named for named in names if named[1]]), others


def beside(media: Path) -> Path:
    """Return the .txt of a medium; its ending may be in capitals, its name in another normal form."""
    names = (media.with_suffix(ending) for ending in (".txt", ".TXT", ".Txt"))
    found = (path for name in names if (path := in_any_form(name)).is_file())
    return next(found, media.with_suffix(".txt"))


def in_any_form(path: Path) -> Path:
    """Return the file of this name; where there is none, that whose name is the same in Unicode's other form.

    Macs write a letter and its accent as two characters, other systems as one.
    """
    if str(path).isascii() or path.exists():
        return path
    found = Path(path.anchor)
    for part in path.parts[bool(path.anchor) :]:  # each folder may be of another system
        forms = (found / unicodedata.normalize(form, part) for form in ("NFC", "NFD"))
        found = next((form for form in (found / part, *forms) if form.exists()), None)
        if found is None:
            return path
    return found


def caption(media: Path) -> str:
    """Read the prompt beside a file that is not used; empty if that cannot be read."""
    try:
        return clean(beside(media).read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError):
        return ""


def holds(names: list[str], name: str) -> bool:
    """Return whether a sorted list holds `name`; a set would double the memory of a long list."""
    place = bisect_left(names, name)
    return place < len(names) and names[place] == name
