"""Folders with a link to nothing, half a download or something else in a file's place."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_cases import slow_but

from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import link_or_copy
from wandistiller.wan.pipeline import open_wan, require_weights
from wandistiller.wan.weight_reader import WeightReader

WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
READ_FIRST = ("vae/config.json", "tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json")
READ_LATER = [*(f"{part}/{name}" for part, name in WEIGHTS.items()), "tokenizer/tokenizer.json"]
GROUPS = pytest.mark.parametrize("names", [READ_FIRST, READ_LATER], ids=["first", "later"])
"""Files whose problems come at once: those that describe the pipeline, and the others."""


def refusals(folder: Path) -> list[str]:
    """The messages about the pipeline in `folder`."""
    with pytest.raises(ConfigError) as raised:
        require_weights(open_wan(str(folder)))
    return raised.value.problems


def refusal(folder: Path) -> str:
    (text,) = refusals(folder)
    return text


@pytest.fixture
def wan(wan1: Path, copy_of: Callable[..., Path]) -> Path:
    return copy_of(wan1, weights=True)


@GROUPS
def test_links_to_nothing_in_place_of_files_that_are_read_are_refused(wan: Path, names: list[str]) -> None:
    for name in names:
        (wan / name).unlink(missing_ok=True)
        (wan / name).symlink_to("/mnt/gone/file")
    found = refusals(wan)
    begins = sorted(f"{wan / name}: it is a link to /mnt/gone/file" for name in names)
    assert [text[: len(begin)] for text, begin in zip(sorted(found), begins, strict=True)] == begins


@GROUPS
def test_files_whose_download_goes_on_are_refused_however_whole_they_look(
    wan: Path, names: list[str]
) -> None:
    for name in names:
        (wan / f"{name}.aria2").touch()
    begins = [f"{wan / name}.aria2: the download of {Path(name).name} is not finished." for name in names]
    found = refusals(wan)
    assert all(any(text.startswith(begin) for text in found) for begin in begins)
    assert len(found) == len(names)


def sharded(wan: Path, part: str) -> Path:
    """Split the weights of a part; return the index."""
    tensors = load_file(wan / part / WEIGHTS[part])
    stem, names, weight_map = WEIGHTS[part].partition(".")[0], sorted(tensors), {}
    for i, some in enumerate((names[:5], names[5:])):
        file = f"{stem}-0000{i + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, wan / part / file, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    (wan / part / WEIGHTS[part]).unlink()
    index = wan / part / f"{WEIGHTS[part]}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    return index


def change(index: Path, **values: Any) -> None:
    whole = json.loads(index.read_text()) | values
    index.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))


@pytest.mark.parametrize("part", slow_but(["text_encoder"], list(WEIGHTS)))
def test_an_index_that_names_some_of_the_tensors_in_its_files_is_refused(wan: Path, part: str) -> None:
    index = sharded(wan, part)
    require_weights(open_wan(str(wan)))
    stem = WEIGHTS[part].removesuffix(".safetensors")

    def error() -> str:
        with pytest.raises(ConfigError) as raised:
            WeightReader(wan / part, stem)
        return str(raised.value)

    names = json.loads(index.read_text())["weight_map"]
    change(index, weight_map=dict(list(names.items())[1:]))
    assert refusal(wan).startswith(f"{index}: it names {len(names) - 1} of the {len(names)} tensors")
    first, second = list(names.items())[0], list(names.items())[-1]
    change(index, weight_map=names | {first[0]: second[1]})
    assert f"{index}: it lists `{first[0]}` in {second[1]}, which lacks it." in error()
    change(index, weight_map=names, metadata=None)  # the libraries end with a KeyError
    assert f"{index}: `metadata` is missing" in error()
    change(index, weight_map={})
    assert f"{index}: `weight_map` must name a file" in error()


def test_of_one_file_and_an_index_that_is_checked_which_the_library_reads(wan: Path) -> None:
    """For the text encoder transformers takes the file, for the others diffusers takes the index."""
    for part in WEIGHTS:
        whole = (wan / part / WEIGHTS[part]).read_bytes()
        sharded(wan, part)
        (wan / part / WEIGHTS[part]).write_bytes(whole[:-8])
    assert refusal(wan).startswith(
        f"{wan / 'text_encoder' / 'model.safetensors'}: it is no whole safetensors file"
    )


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1337\n"


@GROUPS
@pytest.mark.parametrize(
    ("content", "what"), [(POINTER, "a Git LFS pointer"), ("\n<!DOCTYPE html>", "a web page")]
)
def test_what_lies_in_place_of_a_file_is_told(wan: Path, names: list[str], content: str, what: str) -> None:
    for name in names:
        (wan / name).write_text(content)
    found = refusals(wan)
    for name in names if names is READ_LATER else names[:1]:
        assert any(f"{name}: it is {what}" in text for text in found)


OTHERS = {
    "diffusion_pytorch_model.bin": r"pickles \(.bin\) are not read, as they can run code",
    "diffusion_pytorch_model.fp16.safetensors": "the name is another than",
    "diffusion_pytorch_model-00001-of-00002.safetensors": "the index of parts is missing",
}


@pytest.mark.parametrize(("name", "why"), OTHERS.items())
def test_weights_under_another_name_are_told(wan: Path, name: str, why: str) -> None:
    file = wan / "transformer" / WEIGHTS["transformer"]
    file.rename(file.with_name(name))
    assert re.match(f"{file}: there is no such file, but {name}.*{why}", refusal(wan))


def test_a_pickle_under_the_name_of_safetensors_is_told(wan: Path) -> None:
    file = wan / "transformer" / WEIGHTS["transformer"]
    torch.save({name: value.clone() for name, value in load_file(file).items()}, file)
    assert f"{file}: it is a pickle of PyTorch under this name" in refusal(wan)


def test_names_of_a_wrapped_model_are_told(wan: Path) -> None:
    file = wan / "transformer" / WEIGHTS["transformer"]
    save_file({f"module.{name}": value for name, value in load_file(file).items()}, file)
    assert all("are of a wrapped model" in text for text in refusals(wan))


def test_an_export_leaves_out_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "notes.txt").symlink_to("/mnt/gone/file")
    (tmp_path / "vae" / "config.json").write_text("{}")
    link_or_copy(tmp_path / "vae", tmp_path / "copy")
    assert [file.name for file in (tmp_path / "copy").iterdir()] == ["config.json"]
