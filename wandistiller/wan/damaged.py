"""Recognition of what lies in place of a pipeline's file, and the commands that mend it."""

import json
import os
import re
import shlex
from collections.abc import Iterable
from glob import escape
from pathlib import Path

from huggingface_hub import constants

from wandistiller.utils.files import PARTIAL, in_its_place

PARTS = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
PICKLE = (b"PK\x03\x04", b"\x80\x02")
"""Beginnings of what torch.save writes."""
NOT_READ = "and pickles (.bin) are not read, as they can run code"


def pipeline_of(folder: Path) -> Path:
    """Return the pipeline that a part's folder is of; the folder itself if it is of none."""
    return folder.parent if folder.name in PARTS and (folder.parent / "model_index.json").exists() else folder


def fetch_again(file: Path) -> str:
    """Return the sentence with the command that fetches a file of a pipeline anew."""
    top = pipeline_of(file.parent)
    inside, place = str(file.relative_to(top)), str(top.absolute())
    if cached := re.fullmatch(r"(.*)/models--([^/]+)/snapshots/([^/]+)", place):
        hub, hub_id, commit = cached[1], cached[2].replace("--", "/"), cached[3]
        words = [hub_id, inside, "--revision", commit, "--force-download"]
        words += [] if hub == constants.HF_HUB_CACHE else ["--cache-dir", hub]
        return f"Fetch this file again: `{shlex.join(['hf', 'download', *words])}`."
    command = shlex.join(["hf", "download", "ORG/NAME", inside, "--local-dir", str(top), "--force-download"])
    return f"Fetch this file again: `{command}`, with its hub id for ORG/NAME."


def unfinished(folder: Path, names: Iterable[str]) -> list[str]:
    """List the files of `folder` among `names` that are links to nothing, or that are still being written."""
    problems = []
    for file in (folder / name for name in names):
        if file.is_symlink() and not file.exists():
            problems.append(
                f"{file}: it is a link to {os.readlink(file)}, which is not there. Put that back in its "
                f"place, or take the link away. {fetch_again(file)}"
            )
        for end in PARTIAL:
            if (half := file.with_name(file.name + end)).exists():
                problems.append(
                    f"{half}: the download of {file.name} is not finished. Let it end, or delete both files. "
                    f"{fetch_again(file)}"
                )
    return problems


def cure(file: Path) -> str | None:
    """Say what a file is that should be safetensors, and how to mend it; None: nothing that is known."""
    with file.open("rb") as opened:
        raw = opened.read(512)
    if raw.startswith(PICKLE):
        target = file.with_suffix(".bin")
        return (
            f"it is a pickle of PyTorch under this name, {NOT_READ}. Convert it, if you trust its source: "
            f"`{shlex.join(['mv', str(file), str(target)])} && {_rewritten(target, 'load')}`."
        )
    if not (what := in_its_place(raw)):
        return None
    top = pipeline_of(file.parent)
    if what.startswith("a Git LFS") and (top / ".git").exists():
        pull = ["git", "-C", str(top), "lfs", "pull", f"--include={file.relative_to(top)}"]
        return f"it is {what}. Run `{shlex.join(pull)}`, which needs git-lfs (`apt install git-lfs`)."
    return f"it is {what}. {fetch_again(file)}"


def missing(file: Path) -> str:
    """Say what lies in a folder that lacks the weights `file`, and how to make them of that."""
    folder, stem = file.parent, file.name.removesuffix(".safetensors")
    names = sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []
    kind = re.compile(r"((?:diffusion_)?pytorch_model)[\w.-]*\.bin" if "-of-" not in stem else "(?!)")
    pickles = [found for name in names if (found := kind.fullmatch(name))]
    shards = [n for n in names if re.fullmatch(rf"{re.escape(stem)}-\d+-of-\d+\.safetensors", n)]
    variants = [n for n in names if re.fullmatch(rf"{re.escape(stem)}\.\w+(-\d+-of-\d+)?\.safetensors", n)]
    if shards:
        index = file.with_name(f"{file.name}.index.json")
        return f"there are its {len(shards)} part(s), but no {index.name}. {fetch_again(index)}"
    if variants:
        variant = variants[0].removeprefix(f"{stem}.").removesuffix(".safetensors").partition("-")[0]
        parts = f"{stem}.{variant}-*.safetensors"
        move = shlex.join(["mv", str(folder / variants[0]), str(file)])
        command = _rewritten(file, "load_file", parts) if "-of-" in variants[0] else move
        return f"only its variant {variant} is there, which is not read under that name. Run `{command}`."
    if pickles:
        command = _rewritten(file, "load", f"{pickles[0][1]}*.bin")
        given = f"Convert {pickles[0][0]}, if you trust its source"
        return f"there is no such file, {NOT_READ}. {given}: `{command}`."
    return f"there is no such file. {fetch_again(file)}"


def _rewritten(file: Path, load: str, pattern: str = "") -> str:
    """Return the command that writes the tensors of files in the folder of `file` to one of safetensors.

    Args:
        load: `load` of torch, or `load_file` of safetensors.
        pattern: names of the files; default that of `file`.
    """
    files = json.dumps(escape(str(file.parent)) + "/" + (pattern or escape(file.name)), ensure_ascii=False)
    target = json.dumps(str(file.with_suffix(".safetensors")), ensure_ascii=False)
    call = 'torch.load(f, map_location="cpu", weights_only=True)' if load == "load" else "load_file(f)"
    functions = "save_file" if load == "load" else "load_file, save_file"
    code = (
        f"import torch; from glob import glob; from safetensors.torch import {functions}; "
        f"save_file({{k: v.clone() for f in sorted(glob({files})) for k, v in {call}.items()}}, {target}, "
        '{"format": "pt"})'
    )
    return f"python -c {shlex.quote(code)}"


def prefix_problem(folder: Path, files: list[Path], prefix: str, index: Path) -> str:
    """Return the problem of weights whose names all begin with `prefix`, with the command that takes it off.

    Args:
        index: the file that names those in which the tensors are; there may be none.
    """
    names = json.dumps([str(file) for file in files], ensure_ascii=False)
    code = (
        "from safetensors.torch import load_file, save_file; "
        f"[save_file({{k.removeprefix({json.dumps(prefix)}): v.clone() for k, v in load_file(f).items()}}, "
        f'f, {{"format": "pt"}}) for f in {names}]'
    )
    command = f"python -c {shlex.quote(code)}"
    if index.is_file():
        expression = f's/"{re.escape(prefix)}/"/g'
        command += f" && {shlex.join(['sed', '-i', expression, str(index)])}"
    return (
        f"{folder}: the names of its tensors begin with `{prefix}`, as those of a wrapped or compiled model. "
        f"Keep a copy, then take it off: `{command}`."
    )
