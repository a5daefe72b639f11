"""The files that a LoRA's name means, and the expert of a Wan that each is for."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from wandistiller.experts import Expert
from wandistiller.network.weight_reader import DIFFUSERS_STEM, unfinished
from wandistiller.utils.errors import ADDRESS, ConfigError, Place
from wandistiller.utils.files import FACTS, read_json
from wandistiller.wan.lora_files import experts_in, header_of

FILES = {
    Expert.HIGH_NOISE: "pytorch_lora_weights.safetensors",
    Expert.LOW_NOISE: "pytorch_lora_weights_2.safetensors",
}
"""File names in a folder for diffusers."""
OF_PEFT = "adapter_model.safetensors"
BOTH = "both"
SIDES = (*(expert.key for expert in Expert), BOTH)
"""What a user writes for the expert of a file: before it and a `=`, or as the key of an object."""
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of a name, between other signs or from one capital to the next."""
OF_RUNS = ("resolved/run.json", "run_state.json")
"""Files in the folder of a run, or of a checkpoint."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def split_side(word: str) -> tuple[str, str]:
    """Return what a user wrote for the expert of a LoRA, one of `SIDES` or nothing, and the LoRA's name."""
    side, _, name = word.partition("=")
    return (side, name) if side in SIDES else ("", word)


def files_of(name: str, side: str = "") -> list[Path]:
    """Return the LoRA files that a name means: itself, or those in a folder.

    Args:
        name: a file, or a folder: of diffusers, of a run of adapters, of peft, or with one file or one for
            each expert.
        side: the expert that a file is wanted for; of two files its own is meant.

    Raises:
        ConfigError: there is no such file, or a folder does not say which.
    """
    require_files([name])
    path = Path(os.path.expanduser(name))
    known = [[path / file for file in FILES.values()], adapters_of(path), [path / OF_PEFT]]
    files = next((there for group in known if (there := [f for f in group if f.is_file()])), [])
    if not files and any((path / file).is_file() for file in OF_RUNS):
        words = ["wandistiller", "export", "--adapter", "--checkpoint", name, "--output", "students/lora"]
        remedy = f"If it trains adapters, run `{shlex.join(words)}` and give that; else give it as the model."
        raise ConfigError(f"{name}: is a run or a checkpoint without a LoRA. {remedy}")
    if not files:
        require_no_full_model(name)
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    by_expert = {expert_of(file): file for file in files}
    if len(files) != 1 and not len(files) == 2 == len(by_expert.keys() & {*Expert}):
        listed = f"several files: {', '.join(f.name for f in files)}" if files else "no .safetensors file"
        raise ConfigError(f"{name}: is a folder with {listed}. Name the LoRA file.")
    return [by_expert[Expert.of_key(side)]] if len(files) == 2 and side not in ("", BOTH) else files


def require_files(names: Iterable[str]) -> None:
    """Raise ConfigError with every file or folder that is not here, and what its name may be."""
    paths = {name: Path(os.path.expanduser(name)) for name in names}
    if away := [f"{name}: {_absent(name, path)}" for name, path in paths.items() if not path.exists()]:
        raise ConfigError(*away)


def _absent(name: str, path: Path) -> str:
    if ADDRESS.match(name):
        return "is an address. Fetch the file, and give its name here."
    if problems := unfinished(path.parent, [path.name]):
        return problems[0]
    if HUB_ID.fullmatch(name) and path.suffix != ".safetensors":
        words = ["hf", "download", name, "--include", "*.safetensors", "--local-dir", path.name]
        return f"no such file here. If it is on the hub, run `{shlex.join(words)}`, and give the file."
    return "no such file. Fix the path, or put it back; start all commands of a run in the same folder."


def is_full_model(path: Path) -> bool:
    """Return whether `path` is a pipeline's folder, a transformer's, or a file with a network's first map."""
    if path.is_dir():
        return (path / "transformer").is_dir() or any(path.glob(f"{DIFFUSERS_STEM}*.safetensors"))
    return any(key.endswith("patch_embedding.weight") for key in header_of(path)[0])


def require_no_full_model(name: str, teacher: str = "TEACHER", flags: Iterable[object] = ()) -> None:
    """Raise ConfigError if a whole network is given as a LoRA, with the command that makes one of it.

    Args:
        flags: of the command.
    """
    if is_full_model(path := Path(os.path.expanduser(name))):
        output = f"{path.name.removesuffix('.safetensors')}_lora"
        words = ["wandistiller", "export", "--adapter", "--checkpoint", name, "--teacher_path", teacher]
        command = shlex.join([*words, *map(str, flags), "--output", output])
        raise ConfigError(f"{name}: is a whole model. Make a LoRA of it: `{command}`, and give {output}.")


def adapters_of(run: Path) -> list[Path]:
    """List the LoRA files of a run of adapters, whose student is its teacher with them; else none."""
    if not (run / "lora.card" / FACTS).is_file() or (run / "student" / "model_index.json").is_file():
        return []
    of_two = [run / f"lora_{expert.key}.safetensors" for expert in Expert]
    return [file for file in (run / "lora.safetensors", *of_two) if file.is_file()]


def expert_of(file: Path) -> Expert | None:
    """Return the expert that a LoRA file is for; None: nothing says it.

    By its run's facts, its keys, its place in a folder for diffusers, or else by the word `high` or `low` in
    its name, or else in its folder's.
    """
    facts = facts_of(file)
    if (bases := facts.get("bases")) in ([e.value] for e in Expert) and facts.get("boundary") is not None:
        return Expert(bases[0])
    low = Expert.LOW_NOISE
    if bases == [low.value] or experts_in(file) == {low} or file.name == FILES[low]:
        return low
    if file.name == FILES[Expert.HIGH_NOISE] and file.with_name(FILES[low]).is_file():
        return Expert.HIGH_NOISE
    for name in (file.name.removesuffix(".safetensors"), file.absolute().parent.name):
        words = {word.lower().removesuffix("noise") for word in WORD.findall(name)}
        if sides := words & {"high", "low"}:
            return None if len(sides) > 1 else Expert.of_key(f"{sides.pop()}_noise")
    return None


def facts_of(file: Path) -> dict[str, Any]:
    """Return the facts of the run that made a LoRA file, from its header or its folder; else none."""
    if (beside := facts_beside(file)) != file:
        return read_json(beside)
    try:
        facts = json.loads(header_of(file)[1].get("wandistiller", "{}"))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def facts_beside(file: Path) -> Path:
    """Return the file with the facts of a LoRA in a folder for diffusers; of another the file itself.

    Its header has them then.
    """
    beside = file.with_name(FACTS)
    return beside if file.name in FILES.values() and beside.is_file() else file


def sides_of(where: Place, said: Sequence[tuple[Path, str]], networks: int) -> list[str]:
    """Return for which expert each LoRA file is, one of `SIDES`; of one network what the user wrote.

    Args:
        said: files, and what the user wrote for their experts, or nothing.
        networks: that the pipeline has.

    Raises:
        ConfigError: nothing says for which of two experts a file is, or files of two are for one network.
    """
    of = {file: experts_in(file) or {expert_of(file)} - {None} for file, side in said if not side}
    if networks == 1:
        if len(set().union(*of.values())) == 2:
            files = " and ".join(map(str, of))
            text = f"{files} are for two experts, and here is one network. Give one, or write {BOTH}=FILE."
            raise ConfigError(where.problem(text))
        return [side for _, side in said]
    if unclear := [file for file, experts in of.items() if not experts]:
        text = "nothing says for which of the two experts {} is: neither its name nor its folder's has "
        text += "one of the words high and low. Write {}={}, {}={}, or {}={} for both."
        texts = (text.format(file, *(word for s in SIDES for word in (s, file))) for file in unclear)
        raise ConfigError(*map(where.problem, texts))
    return [side or (BOTH if len(of[file]) == 2 else next(iter(of[file])).key) for file, side in said]
