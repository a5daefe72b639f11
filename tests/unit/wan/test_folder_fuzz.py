"""Teacher folders with one wrong JSON: they are refused by a message, or everything in them really works."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from wandistiller.utils.errors import ConfigError
from wandistiller.wan.loaded_components import load_pipeline
from wandistiller.wan.pipeline import open_wan, require_weights

VALUES: list[Any] = [
    None,
    -1,
    10**30,
    "../../evil",
    "evil.Evil",
    ["evil", "Evil"],
    {"AutoModel": "evil.Evil"},
]
EXTRA = {
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]},
    "_class_name": "Evil",
    "architectures": ["Evil"],
    "trust_remote_code": True,
    "custom_pipeline": "evil",
    "quantization_config": {"quant_method": "evil"},
    "tokenizer_class": "Evil",
    "_commit_hash": 1,
    "torch_dtype": "evil",
    "attn_implementation": "evil/evil",
    "nobody knows it": 1,
}
TEXTS = [b"", b"[]", b"[" * 10**5]
MARKER = "ran"
Change = tuple[str, str, Any]


def changes(folder: Path) -> Iterator[Change]:
    """Yield (file, key, value): "-" removes the key; without a key the value is the whole file."""
    for file in sorted(folder.rglob("*.json")):
        name, content = str(file.relative_to(folder)), json.loads(file.read_text())
        if name.endswith(("tokenizer.json", ".index.json")):
            content = {}  # one library's own format, the other checked in test_weight_reader.py
        yield from ((name, "", text) for text in TEXTS)
        for key in content:
            yield name, key, "-"
            yield from ((name, key, value) for value in VALUES if value != content[key])
        yield from ((name, key, value) for key, value in EXTRA.items())


def apply(change: Change, folder: Path) -> None:
    name, key, value = change
    file = folder / name
    content = json.loads(file.read_text()) if key else None
    file.unlink()
    if not key:
        file.write_bytes(value)
        return
    if value == "-":
        del content[key]
    else:
        content[key] = value
    file.write_text(json.dumps(content))


def linked(folder: Path, target: Path) -> Path:
    """A copy whose weights are links, with files of code in every folder."""
    for file in folder.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, copy)
    for part in [target, *(p for p in target.iterdir() if p.is_dir())]:
        for name in ("evil.py", "diffusers.py", "pipeline.py"):
            code = (
                f"import pathlib; pathlib.Path({str(target.parent / MARKER)!r}).touch()\nclass Evil: pass\n"
            )
            (part / name).write_text(code)
    return target


def verdict(folder: Path) -> str:
    """Open, load and use the pipeline: "refused", "works", or the exception that a user would see."""
    try:
        require_weights(open_wan(str(folder)))
    except ConfigError:
        return "refused"
    except Exception as error:
        return f"open: {type(error).__name__}: {error}"
    try:
        pipeline = load_pipeline(open_wan(str(folder)), torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 16, "width": 16, "num_frames": 1, "max_sequence_length": 512}
        pipeline("a cat", num_inference_steps=2, guidance_scale=1.0, output_type="latent", **size)
    except Exception as error:
        return f"use: {type(error).__name__}: {error}"
    return "works"


def outcomes(folder: Path, tmp_path: Path, chosen: list[Change]) -> dict[str, str]:
    """The verdicts that are neither "refused" nor "works"."""
    bad = {}
    for number, change in enumerate(chosen):
        copy = linked(folder, tmp_path / str(number) / "wan")
        apply(change, copy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = verdict(copy)
        if (copy.parent / MARKER).exists():
            result += ", and code ran"
        if result not in ("refused", "works"):
            bad[str(change)[:120]] = result[:300]
        shutil.rmtree(copy.parent)
    return bad


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_a_folder_with_one_wrong_json_is_refused_or_works_and_never_runs_code(
    every: int, wan2: Path, tmp_path: Path
) -> None:
    assert outcomes(wan2, tmp_path, list(changes(wan2))[7::every]) == {}
