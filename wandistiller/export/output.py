"""The files of an export, which appear whole and replace an earlier one alone; the interface of a format."""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wandistiller.checkpoint.facts import Facts
from wandistiller.config.job import Job
from wandistiller.export.source import Source
from wandistiller.utils.errors import ConfigError, folder_problems
from wandistiller.utils.files import (
    FACTS,
    atomic,
    delete_leftovers,
    flush,
    flush_all,
    open_as_umask_says,
    system_error,
)
from wandistiller.utils.logging import set_activity
from wandistiller.utils.registry import classes_in


def check_folder(target: Path) -> Path:
    """Return `target` if a folder can be written there: a new one, an empty one, or an earlier export.

    Raises:
        ConfigError: it cannot.
    """
    if problems := folder_problems("output", target):
        raise ConfigError(*problems)
    why = ""
    if target.suffix == ".safetensors":
        why = "is the name of a file, and this format is a folder. Name one, or give --format original"
    elif target.is_dir() and (target.samefile(Path()) or os.path.ismount(os.path.realpath(target))):
        why = "is the current folder, or a disk's, and would be replaced as a whole. Name a folder in it"
    elif target.is_dir() and any(target.iterdir()) and not (target / FACTS).is_file():
        why = "is a folder with something else in it. Move that away, or name a new one or an earlier export"
    if why:
        raise ConfigError(f"the output {target}: {why}.")
    return target


def check_files(target: Path, files: list[Path]) -> Path:
    """Return the folder for the card of .safetensors files that are new or an earlier export.

    Raises:
        ConfigError: they are not, or `target` is no name for such a file.
    """
    if target.suffix != ".safetensors" or target.is_dir():
        raise ConfigError(
            f"the output {target}: is no file name for weights. Write one that ends with .safetensors."
        )
    for file in files:
        if file.is_file() and not _is_ours(file):
            raise ConfigError(
                f"the output {file}: is there, and no earlier export. Move it away, or name another."
            )
    return check_folder(target.with_suffix(".card"))


def check_ends(stages: list[Job], output: Path) -> None:
    """Check that runs can write their students when they end.

    Args:
        output: of the whole recipe, which gets those of its last stage.
    Raises:
        ConfigError: something else is there.
    """
    folders = [(job, job.output) for job in stages if not job.is_spent]
    for job, folder in [*folders, (stages[-1], output)]:
        if job.networks.bases:
            experts, file = [expert.value for expert in job.networks.student], folder / "lora.safetensors"
            check_files(file, [per_expert(file, experts, expert) for expert in experts])
        if not job.networks.is_teacher_with_adapters(job.folder):
            check_folder(folder / "student")


def _is_ours(file: Path) -> bool:
    try:
        with safe_open(file, "pt") as opened:
            return "wandistiller" in (opened.metadata() or {})
    except Exception:  # safetensors 0.8 raises an exception of its own for a file of another kind
        return False


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield a new folder, which takes `target`'s place, on the disk, when the block ends without an error.

    A symbolic link stays, and the folder that it leads to is replaced.
    """
    target = Path(os.path.realpath(target))
    temporary, earlier = (target.with_name(f".{target.name}.{end}") for end in ("tmp", "old.tmp"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    set_activity(f"writing {target}")
    try:
        yield temporary
        open_as_umask_says(temporary)
        flush_all(temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)  # of a full disk
        if refused := system_error(error, target):
            raise refused from None
        raise
    shutil.rmtree(earlier, ignore_errors=True)
    if target.exists():  # deleted afterwards, as that takes time, in which a kill would leave nothing
        target.rename(earlier)
    temporary.rename(target)
    flush(target.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def per_expert(file: Path, experts: list[str], expert: str) -> Path:
    """FILE, or for a student of two experts FILE_high_noise and FILE_low_noise."""
    side = {"transformer": "_high_noise", "transformer_2": "_low_noise"}[expert] if len(experts) > 1 else ""
    return file.with_name(f"{file.stem}{side}{file.suffix}")


def write_file(
    file: Path,
    tensors: dict[str, Tensor],
    architecture: str,
    description: str,
    facts: Facts,
    together: ExitStack,
) -> None:
    """Write one safetensors file with the metadata that loaders and model managers read.

    Args:
        architecture: as in https://github.com/Stability-AI/ModelSpec; a LoRA's ends with /lora.
        together: when it ends without an error, the file takes its place, with the others that it has.
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
    delete_leftovers(file.parent, file.name)
    temporary = together.enter_context(atomic(file))
    save_file(tensors, temporary, metadata)
    flush(temporary)  # so that the last file is not far behind the first


@dataclass(frozen=True, kw_only=True)
class ExportFormat(ABC):
    """One file format. The fields of a subclass are the flags that it reads, by their names."""

    DTYPES = ("bfloat16", "float16", "float32")
    """Values of --dtype that it can store."""
    dtype: torch.dtype = torch.bfloat16
    """Of the stored weights, except those that diffusers keeps in float32."""
    repository: str = ""
    """Hub repository for the model card to name; empty: none."""

    def problems(self) -> list[str]:
        """Problems with this format's own settings, found before anything is read."""
        return []

    @abstractmethod
    def write(self, source: Source, output: Path) -> list[Path]:
        """Write the student and its model card; return the files and folders made.

        Raises:
            ConfigError: `output` holds something else, or this student has no such form.
        """


def formats() -> dict[str, type[ExportFormat]]:
    return classes_in("wandistiller.export.formats", ExportFormat)
