"""The texts of the repository as tests read them: commands, code blocks, links and headings of each page."""

import re
import shlex
from functools import cache
from typing import NamedTuple

from ranks import ROOT

DOCS = sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))
PAGES = [
    "README.md",
    "launch/README.md",
    "ds_configs/README.md",
    "ds_configs/recipes/README.md",
    *DOCS,
    "CONTRIBUTING.md",
]
SCRIPTS = re.compile(r"launch/(one_process|deepspeed|no_ssh|torchrun|mpirun)\.sh|launch/slurm\.sbatch")


class Command(NamedTuple):
    """One line of a ```bash block."""

    line: str
    words: tuple[str, ...]

    @property
    def ours(self) -> tuple[str, ...]:
        """The arguments of `wandistiller`, whatever starts it; empty for other programs."""
        starts = [i for i, word in enumerate(self.words) if word == "wandistiller" or SCRIPTS.fullmatch(word)]
        return self.words[starts[0] + 1 :] if starts else ()

    def value(self, flag: str) -> str:
        """The word after `flag`, or nothing."""
        return dict(zip(self.words, self.words[1:], strict=False)).get(flag, "")


@cache
def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, page: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text(page), re.DOTALL)


def commands(page: str) -> list[Command]:
    """All lines of the page's bash blocks; lines that a backslash continues are joined."""
    lines = "\n".join(blocks("bash", page)).replace("\\\n", " ").splitlines()
    return [Command(line, tuple(words)) for line in lines if (words := shlex.split(line, comments=True))]


def unique(names: set[str]) -> list[Command]:
    """The `wandistiller` commands of all pages with one of these names, each once."""
    every = (c for page in PAGES for c in commands(page))
    return list({c.ours: c for c in every if c.ours[:1] and c.ours[0] in names}.values())


def plain(page: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)


def table_rows(page: str, first_cell: str) -> list[list[str]]:
    """Cells of the table rows whose first cell matches a regular expression."""
    lines = [line for line in text(page).splitlines() if re.match(rf"\| {first_cell}", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


VIDEOS = {row[1].strip("`").removesuffix(".json"): row for row in table_rows("docs/video.md", "81 frames")}
"""Rows of the recipes for video, by recipe."""


AFTER_A_RUN = ("export", "sample", "evaluate", "report")
"""Commands that need a finished run."""
