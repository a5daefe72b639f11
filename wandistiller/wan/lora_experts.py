"""The files that a LoRA's name means, and the expert of a Wan that each is for."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import read_json
from wandistiller.wan.lora_files import IN_A_FOLDER

FILES = {Expert.HIGH_NOISE: IN_A_FOLDER, Expert.LOW_NOISE: "pytorch_lora_weights_2.safetensors"}
"""File names in a folder for diffusers."""
FACTS = "wandistiller.json"
"""File in an export with the facts of its run."""
WITH_NOISE = re.compile(r"(?<![a-z])(high|low)[ _.-]?noise(?![a-z])")
AT_THE_END = re.compile(r"(?<![a-z])(high|low)$")
OF_PICTURES = "angle|contrast|details?|fps|key|light|motion|poly|quality|rank|res|resolution|speed|vram"
ALONE = re.compile(rf"(?<![a-z])(high|low)(?![a-z])(?![ _.-]?(?:{OF_PICTURES})(?![a-z]))")
"""In a file's name the expert that it is for; not in `slow_motion` or `low_poly`."""
SIDES = re.compile(r"high|low|(?<![a-z])[hl]n?(?![a-z])")
"""Parts in which the names of two experts' files differ."""


def files_of(path: Path, said: Expert | None = None) -> list[Path]:
    """Return the LoRA files that a path means: itself, or the one or two in a folder for diffusers.

    Args:
        said: the expert that a file is wanted for; of two files its own is meant.
    """
    inside = {expert: path / name for expert, name in FILES.items() if (path / name).is_file()}
    if len(inside) == 2 and said:
        return [inside[said]]
    return [*inside.values()] or [path]


def expert_of(file: Path) -> Expert | None:
    """Return the expert that a LoRA file is for: by its run's facts, its place in a folder, or its name.

    None: nothing says it, or it is a folder, as a pipeline of both.
    """
    if file.is_dir():
        return None
    if facts_of(file).get("bases") == [Expert.LOW_NOISE.value]:
        return Expert.LOW_NOISE
    if file.name == FILES[Expert.LOW_NOISE]:
        return Expert.LOW_NOISE
    if file.name == IN_A_FOLDER and file.with_name(FILES[Expert.LOW_NOISE]).is_file():
        return Expert.HIGH_NOISE
    own, above = file.name.lower().removesuffix(".safetensors"), file.absolute().parent.name.lower()
    for rule, name in ((WITH_NOISE, own), (ALONE, own), (WITH_NOISE, above), (AT_THE_END, above)):
        if sides := {*rule.findall(name)}:
            return Expert.of_key(f"{sides.pop()}_noise") if len(sides) == 1 else None
    return None


def facts_of(file: Path) -> dict[str, Any]:
    """Return the facts of the run that made a LoRA file, from its header or its folder; else none."""
    if (beside := facts_beside(file)) != file:
        return read_json(beside)
    try:
        with safe_open(file, "pt") as opened:
            facts = json.loads((opened.metadata() or {}).get("wandistiller", "{}"))
    except (OSError, SafetensorError, ValueError):
        return {}  # the reader of its weights has the message
    return facts if isinstance(facts, dict) else {}


def facts_beside(file: Path) -> Path:
    """Return the file with the facts of a LoRA in a folder for diffusers; of another the file itself.

    Its header has them then.
    """
    beside = file.with_name(FACTS)
    return beside if file.name in FILES.values() and beside.is_file() else file


def pair_problems(where: str, files: list[Path], write: str) -> list[str]:
    """List pairs of files for all networks whose names differ as those of two experts' files do.

    Args:
        write: what to write for the file of an expert, with {expert} and {file}.
    """
    files = list(dict.fromkeys(files))
    for one, other in combinations(files, 2):
        names = [f"{file.absolute().parent.name}/{file.name}".lower() for file in (one, other)]
        if names[0] != names[1] and len({SIDES.sub("*", name) for name in names}) == 1:
            remedy = write.format(expert="high_noise", file="FILE")
            return [
                f"{where}: {one} and {other} look like the files of two experts, and their names do not say "
                f"which is whose. Write {remedy}, and the same with low_noise."
            ]
    return []


def require_one_side(where: str, files: list[Path]) -> None:
    """Check that the files for a single network are not those of two experts.

    Raises:
        ConfigError: they are.
    """
    of = {expert: file for file in files if (expert := expert_of(file))}
    if len(of) == 2:
        raise ConfigError(
            f"{where}: {of[Expert.HIGH_NOISE]} is for the {Expert.HIGH_NOISE.in_words}, "
            f"{of[Expert.LOW_NOISE]} for the {Expert.LOW_NOISE.in_words}, and here is one network. Give one."
        )
