"""launch/README.md has every error message: who searches there for a part of one finds when it comes and what to do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from deepspeed.launcher import runner

from wandistiller.kinds import KINDS

ROOT = Path(__file__).parent.parent
HEADING = "## Troubleshooting by message"
SPEAKERS = {"ConfigError", "StorageError", "Notice", "problem", "stop_if_asked", "_alarm", "_complain"}
"""What is called with text that people then see; `raise` is another."""
REASONS = {"faults", "told", "remedies", "followed", "problems", "_refusal", "_why_not", "_in_words", "_lost", "_over",
           "unlike_published"}  # fmt: skip
"""Functions all of whose text is, or becomes a part of what is said."""
SENTENCE = re.compile(r"[^.]\.$|(pip|apt) install|damaged")
"""What a text of any other place is told by, such as one in a table of refusals."""
NO_MESSAGES = {"card", "commandline", "importance", "report", "run_report", "shapes", "_description"}
"""Modules and a function whose sentences stand in files that they write, or in --help."""
IN_SCRIPTS = re.compile(r'\$\{\w+:\?([^}]*)\}|\becho "([^"]*)"')
"""What a shell says: of a variable that is not set, and by itself."""
OF_LAUNCHERS = ("launcher '", "' not installed", "Hostfile contains multiple entries for", "Hostfile contains a bad entry",
                "Unable to find hostfile", "--node_rank is not set correctly", "was not reachable via ssh")  # fmt: skip
"""What deepspeed's own says, where ours do not look first."""
SHORTEST = 12
"""Less says too little to be searched for."""


def plain(text: str) -> str:
    return " ".join(text.replace(r"\|", "|").split())


def spoken_in(node: ast.AST, spoken: bool | None) -> bool | None:
    """Whether all text in `node` is said, only its sentences (False), or none (None), in a place where `spoken` holds."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return None  # a docstring
        case ast.FunctionDef(name=name) if name in NO_MESSAGES:
            return None
        case ast.FunctionDef(name=name) if name in REASONS:
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in SPEAKERS:
            return True
        case ast.Raise():
            return True
    return spoken


def pieces(node: ast.AST, spoken: bool | None) -> Iterator[tuple[int, str]]:
    """(line, text) of each fixed piece of a message in `node`."""
    spoken = spoken_in(node, spoken)
    if isinstance(node, ast.JoinedStr):
        fixed = [str(p.value) for p in node.values if isinstance(p, ast.Constant)]
    else:
        fixed = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    if spoken or spoken is False and fixed and SENTENCE.search(fixed[-1]):
        parts = (plain(part) for text in fixed for part in re.split(r"%[sd]|{}", text))
        yield from ((node.lineno, part) for part in parts if len(part) >= SHORTEST and " " in part)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from pieces(child, spoken)


def messages() -> dict[str, str]:
    """Each fixed piece -> the line where it stands first."""
    found = {f"Write {kind}.": "wandistiller/kinds.py: KINDS" for kind in KINDS}
    for file in sorted((ROOT / "wandistiller").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for line, text in pieces(tree, None if file.stem in NO_MESSAGES else False):
            found.setdefault(text, f"wandistiller/{file.name}:{line}")
    for file in sorted((ROOT / "launch").glob("*.s[hb]*")):
        for said in IN_SCRIPTS.finditer(file.read_text(encoding="utf-8")):
            parts = (plain(part) for part in re.split(r"\$\w+", said[1] or said[2]))
            found |= {part: f"launch/{file.name}" for part in parts if len(part) >= SHORTEST and " " in part}
    return found


SECTION = (ROOT / "launch" / "README.md").read_text(encoding="utf-8").partition(HEADING)[2]
LINES = "\n".join(map(plain, SECTION.splitlines()))  # a message is found where it stands in one line


@pytest.mark.parametrize(("text", "line"), messages().items())
def test_each_message_of_the_source_is_found_in_launch_readme(text: str, line: str) -> None:
    assert text in LINES, f"{line} says `{text}`: add it to `{HEADING}` of launch/README.md"


@pytest.mark.parametrize("text", OF_LAUNCHERS)
def test_each_message_of_deepspeed_s_launcher_is_its_own_and_found_in_launch_readme(text: str) -> None:
    assert text in Path(runner.__file__).read_text(encoding="utf-8") and text in LINES
