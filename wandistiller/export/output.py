"""The files of an export: they appear whole, and replace an earlier export but nothing else."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.utils.errors import ConfigError, folder_problems
from wandistiller.utils.files import atomic, flush, flush_all, open_as_umask_says
from wandistiller.wan.lora_experts import FACTS


def check_folder(target: Path) -> Path:
    """Return `target` if a folder can be written there: a new one, an empty one, or an earlier export.

    Raises:
        ConfigError: it cannot.
    """
    if problems := folder_problems("output", target):
        raise ConfigError(*problems)
    if target.is_dir() and any(target.iterdir()) and not (target / FACTS).is_file():
        raise ConfigError(
            f"--output {target}: is a folder with something else in it. Name a new one, or an earlier export."
        )
    return target


def check_files(target: Path, files: list[Path]) -> Path:
    """Return the folder for the card of .safetensors files that are new or an earlier export.

    Raises:
        ConfigError: they are not, or `target` is no name for such a file.
    """
    if target.suffix != ".safetensors" or target.is_dir():
        raise ConfigError(
            f"--output {target}: is no file name for weights. Write one that ends with .safetensors."
        )
    for file in files:
        if file.is_file() and not _is_ours(file):
            raise ConfigError(f"--output {file}: is there, and no earlier export. Name another.")
    return check_folder(target.with_suffix(".card"))


def _is_ours(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as opened:
            return "wandistiller" in (opened.metadata() or {})
    except Exception:  # safetensors 0.8 raises an exception of its own for a file of another kind
        return False


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield a new folder, which takes `target`'s place, on the disk, when the block ends without an error."""
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    open_as_umask_says(temporary)
    flush_all(temporary)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    flush(target.parent)


def per_expert(file: Path, experts: list[str], expert: str) -> Path:
    """FILE, or for a student of two experts FILE_high_noise and FILE_low_noise."""
    side = {"transformer": "_high_noise", "transformer_2": "_low_noise"}[expert] if len(experts) > 1 else ""
    return file.with_name(f"{file.stem}{side}{file.suffix}")


def write_file(
    file: Path, tensors: dict[str, Tensor], architecture: str, description: str, facts: Facts
) -> Path:
    """Write one safetensors file, atomically, with the metadata that loaders and model managers read.

    Args:
        architecture: as in https://github.com/Stability-AI/ModelSpec; a LoRA's ends with /lora.
    """
    metadata = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": architecture,
        "modelspec.title": file.stem,
        "modelspec.implementation": "https://github.com/Wan-Video/Wan2.1",
        "modelspec.description": description,
        "wandistiller": json.dumps(facts.as_json()),
    }
    with atomic(file) as temporary:
        save_file(tensors, temporary, metadata)
    return file
