"""Lines and records of prompt files: text, JSON lines, and tables with a header (.csv, .tsv)."""

import csv
import html
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import ftfy

from wandistiller.utils.errors import problem

LONGEST_LINE = 2**16
"""Bytes; only the first 512 tokens of a prompt are used."""
DIALECTS = {".csv": "excel", ".tsv": "excel-tab"}
LISTS = (".txt", ".jsonl", *DIALECTS)
NO_MEDIA = {"", *LISTS, *".json .yaml .yml .toml .xml .html .md .rst .log .py .sh .bak .npz .pt".split()}
"""Endings of files that may lie beside a list of prompts of the same name."""
PROMPT_COLUMNS = ("prompt", "caption", "text")
MEDIA_COLUMNS = ("file", "media", "image", "video", "file_name")


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


def parse_json(line: str) -> tuple[str, str | None]:
    """Return the prompt and the medium's name of one line of a .jsonl. Raises ValueError with the reason."""
    try:
        entry = json.loads(line, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}. Write one object a line.") from None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not has_prompt(prompt):
        raise ValueError(
            'no prompt. Write {"prompt": "...", "image": "file.png"}; image, video and id may be left out.'
        )
    if unknown := sorted(set(entry) - {"prompt", "image", "video", "id"}):
        raise ValueError(f"unknown key `{unknown[0]}`. Known keys: prompt, image, video, id.")
    names = [entry[k] for k in ("image", "video") if entry.get(k) is not None]
    if len(names) > 1 or any(not isinstance(n, str) for n in names):
        raise ValueError("give one file name, as image or as video.")
    return prompt.strip(), names[0] if names else None


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
        names = [name.strip().lower() for name in header]
        self._prompt = next((names.index(n) for n in PROMPT_COLUMNS if n in names), -1)
        self._media = next((names.index(n) for n in MEDIA_COLUMNS if n in names), None)
        if self._prompt < 0:
            raise ValueError(
                f"no column {', '.join(PROMPT_COLUMNS[:-1])} or {PROMPT_COLUMNS[-1]}. Begin with a header "
                "such as prompt,file, or write one prompt a line into a .txt."
            )

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

    def item(self, fields: list[str]) -> tuple[str, str | None]:
        """Return the prompt and the medium's name of a record. Raises ValueError with the reason."""
        prompt = fields[self._prompt].strip() if self._prompt < len(fields) else ""
        medium = fields[self._media].strip() if self._media is not None and self._media < len(fields) else ""
        if not has_prompt(prompt):
            raise ValueError("no prompt. Fill its column, or take the line out.")
        return prompt, medium or None


def beside(media: Path) -> Path:
    """Return the .txt of a medium; its ending may be in capitals."""
    found = (path for e in (".txt", ".TXT", ".Txt") if (path := media.with_suffix(e)).is_file())
    return next(found, media.with_suffix(".txt"))


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
