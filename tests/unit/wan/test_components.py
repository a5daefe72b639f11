"""Nothing in a teacher's folder runs: only known classes and keys of its JSON files are used."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import pixels
from ranks import edit_json

from wandistiller.cli.failures import Failures
from wandistiller.cli.parser import read
from wandistiller.evaluation.clip import encoder_problems
from wandistiller.evaluation.sampling import Sampling
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import SHIPPED, TINY
from wandistiller.wan.components import known_config
from wandistiller.wan.pipeline import open_wan


def test_weights_in_pickles_alone_are_refused(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1)
    for part, name in {"vae": "diffusion_pytorch_model", "text_encoder": "pytorch_model"}.items():
        torch.save({}, folder / part / f"{name}.bin")
    with pytest.raises(
        ConfigError, match=r"vae/diffusion_pytorch_model.safetensors: .*pickles \(.bin\) are not"
    ):
        open_wan(str(folder)).require_weights()


def test_an_adapter_of_the_text_encoder_is_refused(wan1: Path, copy_of: Callable[..., Path]) -> None:
    folder = copy_of(wan1, weights=True)
    (folder / "text_encoder" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config.json: Delete it"):
        open_wan(str(folder)).require_weights()


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--teacher_path={}", "--data_path=tiny", "--output_dir={}/../out"),
        ("train", "--teacher_path={}", "--data_path=tiny", "--output_dir={}/../out", "--dry_run"),
        ("sample", "--model={}", "--prompts", "a cat", "--output={}/../out"),
        ("evaluate", "--student={}", "--teacher_path=tiny", "--output={}/../out"),
        ("evaluate", "--student=tiny", "--teacher_path={}", "--output={}/../out"),
    ],
    ids=lambda words: f"{words[0]} {words[1].partition('=')[0]}",
)
def test_every_command_refuses_a_tokenizer_that_brings_code(
    words: tuple[str, ...],
    wan1: Path,
    copy_of: Callable[..., Path],
    tmp_path: Path,
    one_rank: torch.device,
) -> None:
    folder, marker = copy_of(wan1, weights=True), tmp_path / "ran"
    (folder / "tokenizer" / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass")
    about = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    edit_json(folder / "tokenizer" / "tokenizer_config.json", **about)
    with pytest.raises(ConfigError, match="No code of a folder or hub id is ever run"):
        run(*read([word.format(folder) for word in words]))
    assert not marker.exists() and not (tmp_path / "out").exists()


def run(command: str, flags: Any) -> None:
    module = import_module(f"wandistiller.cli.{command}")
    module.run(command, flags, Failures()) if command == "train" else module.run(flags)


@pytest.mark.usefixtures("one_rank")
def test_python_files_in_a_folder_are_never_run(
    wan1: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder, marker = copy_of(wan1, weights=True), tmp_path / "ran"
    for part in ("vae", "text_encoder", "tokenizer", "scheduler", "transformer"):
        for name in ("diffusers.py", "transformers.py"):
            (folder / part / name).write_text(f"open({str(marker)!r}, 'w')")
    open_wan(str(folder)).require_weights()
    pixels(open_wan(str(folder)), tmp_path / "cache", ["a cat"], [0], Sampling(height=16, width=16, steps=1))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "tokenizer_config.json"])
def test_a_clip_folder_that_brings_code_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    assert encoder_problems("clip", tmp_path) == []
    (tmp_path / name).write_text('{"model_type": "clip", "auto_map": {"AutoModel": "evil.Evil"}}')
    (text,) = encoder_problems("clip", tmp_path)
    assert text.startswith(f"{tmp_path / name}: `auto_map` is ") and "No code of a folder" in text


def test_clip_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    torch.save({}, tmp_path / "pytorch_model.bin")
    (text,) = encoder_problems("clip", tmp_path)
    assert text.startswith(f"{tmp_path}: no model.safetensors in it, and pickles")


@pytest.mark.parametrize(
    "file", ["vae/config.json", "text_encoder/config.json", "tokenizer/tokenizer_config.json"]
)
def test_what_is_copied_into_a_student_has_known_keys_only(
    wan1: Path, copy_of: Callable[..., Path], file: str
) -> None:
    folder = copy_of(wan1)
    before = known_config(folder / file)
    edit_json(folder / file, _name_or_path="/home/me/wan", evil={"run": "me"})
    assert known_config(folder / file) == before and before


def test_no_shipped_json_holds_a_path_of_the_machine_that_wrote_it() -> None:
    files = [f for folder in TINY.values() for f in folder.rglob("*.json") if "token" not in f.name]
    files += SHIPPED.rglob("*.json")
    assert [f for f in files if '"/tmp' in f.read_text() or '"/home' in f.read_text()] == []
