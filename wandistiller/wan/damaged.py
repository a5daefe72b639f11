"""Recognition of what lies in place of a pipeline's file, and the program that mends it."""

import os
from collections.abc import Iterable
from pathlib import Path

from wandistiller.utils.files import PARTIAL, in_its_place

AGAIN = "Fetch this file again, with `hf download`; in a clone, with `git lfs pull`."
PICKLE = (b"PK\x03\x04", b"\x80\x02")
"""Beginnings of what torch.save writes."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
SAVED_AGAIN = "If you trust its source, load it with diffusers or transformers and write `save_pretrained`."
NOT_READ = f"pickles (.bin) are not read, as they can run code. {SAVED_AGAIN}"


def unfinished(folder: Path, names: Iterable[str]) -> list[str]:
    """List the files of `folder` among `names` that are links to nothing, or that are still being written."""
    problems = []
    for file in (folder / name for name in names):
        if file.is_symlink() and not file.exists():
            remedy = f"Put that back in its place. {AGAIN}"
            problems.append(f"{file}: it is a link to {os.readlink(file)}, which is not there. {remedy}")
        halves = (file.with_name(file.name + end) for end in PARTIAL)
        text = f"the download of {file.name} is not finished. Let it end, or delete both files. {AGAIN}"
        problems += [f"{half}: {text}" for half in halves if half.exists()]
    return problems


def cure(file: Path) -> str | None:
    """Say what a file is that should be safetensors, and how to mend it; None: nothing that is known."""
    with file.open("rb") as opened:
        raw = opened.read(512)
    if raw.startswith(PICKLE):
        return f"it is a pickle of PyTorch under this name, and {NOT_READ}"
    what = in_its_place(raw)
    return what and f"it is {what}. {AGAIN}"


def missing(file: Path) -> str:
    """Say that the weights `file` are missing, and what lies in their folder instead."""
    there = sorted(f.name for f in file.parent.glob("*") if f.name.endswith(WEIGHTS))
    if pickles := [name for name in there if not name.endswith(WEIGHTS[0])]:
        return f"there is no such file, but {pickles[0]}, and {NOT_READ}"
    if there and "-of-" not in file.name:
        return (
            f"there is no such file, but {there[0]}: the index of parts is missing, or the name is another "
            f"than `save_pretrained` writes. {AGAIN} Or load the folder and save it again."
        )
    return f"there is no such file. {AGAIN}"
