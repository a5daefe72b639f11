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
"""In a file's name a word that may be its expert; not in `slow_motion` or `low_poly`."""
OF_FILES = r"(?:bf|e|ep|epoch|fp|int|q|r|rank|v)?\d|expert|lightning|lightx2v|lora|model"
SURE = re.compile(rf"(?<![a-z])(?:high|low)(?:$|[ _.-]+(?:{OF_FILES}))")
"""Such a word that is its expert: at the end, or before words of files, not as in `high_heels`."""
SIDES = re.compile(r"high|low|(?<![a-z])[hl]n?(?![a-z])")
"""Parts in which the names of two experts' files differ."""


def files_of(path: Path, said: Expert | None = None) -> list[Path]:
    """Return the LoRA files that a path means: itself, or the one or two in a folder.

    Args:
        path: a file, a folder for diffusers, or that of a run of adapters.
        said: the expert that a file is wanted for; of two files its own is meant.
    """
    inside = {expert: path / name for expert, name in FILES.items() if (path / name).is_file()}
    inside = inside or dict(zip(Expert, adapters_of(path), strict=False))
    if len(inside) == 2 and said:
        return [inside[said]]
    return [*inside.values()] or [path]


def adapters_of(run: Path) -> list[Path]:
    """List the LoRA files of a run of adapters, whose student is its teacher with them; else none."""
    if not (run / "lora.card" / FACTS).is_file() or (run / "student" / "model_index.json").is_file():
        return []
    of_two = [run / f"lora_{expert.key}.safetensors" for expert in Expert]
    return [file for file in (run / "lora.safetensors", *of_two) if file.is_file()]


def expert_of(file: Path) -> Expert | None:
    """Return the expert that a LoRA file is for: by its run's facts, its place in a folder, or its name.

    None: nothing says it, or it is a folder, as a pipeline of both.
    """
    if file.is_dir():
        return None
    facts = facts_of(file)
    if (bases := facts.get("bases")) in ([e.value] for e in Expert) and facts.get("boundary") is not None:
        return Expert(bases[0])
    if bases == [Expert.LOW_NOISE.value]:
        return Expert.LOW_NOISE
    if file.name == FILES[Expert.LOW_NOISE]:
        return Expert.LOW_NOISE
    if file.name == IN_A_FOLDER and file.with_name(FILES[Expert.LOW_NOISE]).is_file():
        return Expert.HIGH_NOISE
    own, above = file.name.lower().removesuffix(".safetensors"), file.absolute().parent.name.lower()
    for rule, name in ((WITH_NOISE, own), (ALONE, own), (WITH_NOISE, above), (AT_THE_END, above)):
        if sides := {*rule.findall(name)}:
            if len(sides) > 1 or rule is ALONE and not (SURE.search(name) or _has_twin(file)):
                return None
            return Expert.of_key(f"{sides.pop()}_noise")
    return None


def _has_twin(file: Path) -> bool:
    """Return whether the other expert's file, by its name, lies beside an expert's."""
    swapped = {"high": "low", "low": "high"}
    twin = re.sub("high|low", lambda side: swapped[side[0]], file.name.lower())
    return any(other.name.lower() == twin for other in file.absolute().parent.glob("*.safetensors"))


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


def unclear_problems(where: str, files: list[Path], write: str) -> list[str]:
    """List files for both networks whose names may say that they are for one.

    That are pairs whose names differ as those of two experts' files do, and words that may be an expert.

    Args:
        write: what to write for the file of an expert, with {expert} and {file}.
    """
    for file in files:
        if len(sides := {*ALONE.findall(file.name.lower().removesuffix(".safetensors"))}) == 1:
            expert = Expert.of_key(f"{(side := sides.pop())}_noise")
            one, other = (write.format(expert=e.key, file=file) for e in (expert, *{*Expert} - {expert}))
            return [
                f"{where}: {file}: `{side}` in its name may mean the {expert.in_words}, or not. Write {one} "
                f"if it is for that one alone, or beside it {other} if it is for both."
            ]
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
