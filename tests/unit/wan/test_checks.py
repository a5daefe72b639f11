"""Teacher folders with one wrong JSON: they are refused by a message, or everything in them really works."""

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawing import pixels
from ranks import edit_json

from wandistiller.evaluation.sampling import Sampling
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.pipeline import open_wan

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
    "torch_dtype": "evil",
    "attn_implementation": "evil/evil",
}
Change = tuple[str, str, Any]


def changes(folder: Path) -> Iterator[Change]:
    """Yield file, key and value of each wrong JSON."""
    for file in sorted(folder.rglob("*.json")):
        name = str(file.relative_to(folder))
        other = name.endswith(("tokenizer.json", ".index.json"))  # of one library; of test_weight_reader.py
        for key in () if other else json.loads(file.read_text()):
            yield from ((name, key, value) for value in VALUES)
        yield from ((name, key, value) for key, value in EXTRA.items())


def linked(folder: Path, target: Path, marker: Path) -> Path:
    """Copy a pipeline whose weights are links, with code in every folder that leaves a mark if it runs."""
    for file in folder.rglob("*"):
        if file.is_file():
            copy = target / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(file) if file.suffix == ".safetensors" else shutil.copy(file, copy)
    for part in [target, *(p for p in target.iterdir() if p.is_dir())]:
        for name in ("evil.py", "diffusers.py", "pipeline.py"):
            (part / name).write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    return target


def verdict(folder: Path) -> str:
    """Open, load and use the pipeline: "refused", "works", or the exception that a user would see."""
    try:
        open_wan(str(folder)).require_weights()
        sampling = Sampling(height=16, width=16, steps=2)
        pixels(open_wan(str(folder)), folder / "cache", ["a cat"], [0], sampling)
    except ConfigError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("every", [120, pytest.param(3, marks=pytest.mark.slow)])
def test_a_folder_with_one_wrong_json_is_refused_or_works_and_never_runs_code(
    every: int, wan2: Path, tmp_path: Path
) -> None:
    bad, marker = {}, tmp_path / "ran"
    for name, key, value in list(changes(wan2))[7::every]:
        copy = linked(wan2, tmp_path / "wan", marker)
        edit_json(copy / name, **{key: value})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = verdict(copy)
        if result not in ("refused", "works") or marker.exists():
            bad[f"{name} {key} {value}"[:120]] = result[:300]
        shutil.rmtree(copy)
    assert bad == {} and not marker.exists()
