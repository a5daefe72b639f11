"""Folders with a link to nothing, half a download or something else in a file's place, and the cures."""

import inspect
import json
import shlex
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from huggingface_hub.cli.download import download
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from transformers import UMT5EncoderModel

from wandistiller.utils.errors import ConfigError
from wandistiller.utils.files import link_or_copy
from wandistiller.wan.damaged import fetch_again
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
    for name in names:
        (text,) = [text for text in found if text.startswith(f"{wan / name}: it is a link to /mnt/gone/file")]
        assert f"`hf download ORG/NAME {name} --local-dir {wan} --force-download`" in text
    assert len(found) == len(names)


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


def test_a_pointer_in_a_clone_is_mended_by_git(wan: Path) -> None:
    name = "vae/diffusion_pytorch_model.safetensors"
    (wan / ".git").mkdir()
    (wan / name).write_text(POINTER)
    assert f"Run `git -C {wan} lfs pull --include={name}`" in refusal(wan)


def command(text: str) -> str:
    """The command in a message."""
    return text.split("`")[-2]


def run(text: str) -> None:
    """Run the command of a message; that of Python in this process."""
    for one in command(text).split(" && "):
        words = shlex.split(one)
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
        else:
            subprocess.run(words, check=True)


def assert_mended(wan: Path, wan1: Path, part: str) -> None:
    require_weights(open_wan(str(wan)))
    kind = UMT5EncoderModel if part == "text_encoder" else WanTransformer3DModel
    found, expected = (kind.from_pretrained(folder / part).state_dict() for folder in (wan, wan1))
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)


@pytest.mark.parametrize(
    ("part", "several"),
    slow_but([("text_encoder", True)], list(product(["transformer", "text_encoder"], [False, True]))),
)
def test_the_command_for_pickles_makes_safetensors_of_them(
    wan: Path, wan1: Path, part: str, several: bool
) -> None:
    tensors = load_file(wan / part / WEIGHTS[part])
    if part == "text_encoder":  # as older versions store it
        tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
    stem = "pytorch_model" if part == "text_encoder" else "diffusion_pytorch_model"
    names, half = sorted(tensors), 5 if several else len(tensors)
    for i, some in enumerate(filter(None, (names[:half], names[half:]))):
        end = f"-0000{i + 1}-of-00002" if several else ""
        torch.save({name: tensors[name] for name in some}, wan / part / f"{stem}{end}.bin")
    torch.save({"state": 1}, wan / part / "optimizer.bin")  # of accelerate
    (wan / part / WEIGHTS[part]).unlink()
    text = refusal(wan)
    assert "pickles (.bin) are not read, as they can run code" in text
    run(text)
    assert_mended(wan, wan1, part)


def test_a_pickle_under_the_name_of_safetensors_is_told_and_converted(wan: Path, wan1: Path) -> None:
    file = wan / "transformer" / WEIGHTS["transformer"]
    torch.save({name: value.clone() for name, value in load_file(file).items()}, file)
    text = refusal(wan)
    assert "it is a pickle of PyTorch under this name" in text
    run(text)
    assert_mended(wan, wan1, "transformer")


@pytest.mark.parametrize("several", [False, True])
def test_the_command_for_a_variant_gives_the_usual_file(wan: Path, wan1: Path, several: bool) -> None:
    folder, name = wan / "transformer", WEIGHTS["transformer"]
    tensors = load_file(folder / name)
    names, half = sorted(tensors), 5 if several else len(tensors)
    for i, some in enumerate(filter(None, (names[:half], names[half:]))):
        variant = name.replace(".", f".fp16-0000{i + 1}-of-00002." if several else ".fp16.")
        save_file({key: tensors[key] for key in some}, folder / variant, {"format": "pt"})
    (folder / name).unlink()
    text = refusal(wan)
    assert "only its variant fp16 is there" in text
    run(text)
    assert_mended(wan, wan1, "transformer")


@pytest.mark.parametrize(
    ("prefix", "several"),
    slow_but([("_orig_mod.module.", True)], list(product(["module.", "_orig_mod.module."], [False, True]))),
)
def test_the_command_for_names_of_a_wrapped_model_takes_its_prefix_off(
    wan: Path, wan1: Path, prefix: str, several: bool
) -> None:
    if several:
        index = sharded(wan, "transformer")
        names = json.loads(index.read_text())["weight_map"]
        change(index, weight_map={prefix + name: file for name, file in names.items()})
    for file in (wan / "transformer").glob("*.safetensors"):
        save_file({prefix + name: value for name, value in load_file(file).items()}, file)
    text = refusal(wan)
    assert f"the names of its tensors begin with `{prefix}`" in text
    run(text)
    assert_mended(wan, wan1, "transformer")


def test_parts_without_their_index_ask_for_it(wan: Path) -> None:
    index = sharded(wan, "vae")
    index.unlink()
    assert f"there are its 2 part(s), but no {index.name}." in refusal(wan)


def test_a_file_of_the_hub_s_cache_is_fetched_again_by_its_id_and_commit(tmp_path: Path) -> None:
    top = tmp_path / "models--Wan-AI--Wan2.1-T2V" / "snapshots" / "0a1b"
    top.mkdir(parents=True)
    (top / "model_index.json").touch()
    text = command(fetch_again(top / "vae" / "config.json"))
    expected = "hf download Wan-AI/Wan2.1-T2V vae/config.json --revision 0a1b --force-download"
    assert text == f"{expected} --cache-dir {tmp_path}"


def test_the_hub_s_command_knows_the_options_that_messages_name() -> None:
    assert {"local_dir", "force_download", "revision", "cache_dir"} <= inspect.signature(
        download
    ).parameters.keys()


def test_an_export_leaves_out_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "notes.txt").symlink_to("/mnt/gone/file")
    (tmp_path / "vae" / "config.json").write_text("{}")
    link_or_copy(tmp_path / "vae", tmp_path / "copy")
    assert [file.name for file in (tmp_path / "copy").iterdir()] == ["config.json"]
