"""A pipeline's weights in the files of ComfyUI, as its JSON names them."""

import json
import struct
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from ranks import write_json
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.convert_slow_tokenizer import import_protobuf

from wandistiller.utils.files import TINY, read_json
from wandistiller.wan.components import text_encoder_of, vae_of
from wandistiller.wan.original_names import original_name, original_vae_name
from wandistiller.wan.published import KnownWan

COMFY = "model.diffusion_model."


def weights_in(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@cache
def sentencepiece_of(tokenizer: Path) -> Tensor:
    """Write the pieces of a tokenizer.json by the library's own class; returns the model's bytes."""
    model = import_protobuf().ModelProto()
    for piece, score in json.loads(tokenizer.read_text())["model"]["vocab"]:
        model.pieces.add(piece=piece, score=score)
    return torch.frombuffer(bytearray(model.SerializeToString()), dtype=torch.uint8)


def comfy_files(wan: Path, models: Path, dtype: torch.dtype | None = None, prefix: str = "") -> Path:
    """Write files with the original names into a folder; return the JSON there.

    Args:
        dtype: of the networks; None: as they are stored.
        prefix: before the names of the networks.
    """
    models.mkdir(parents=True, exist_ok=True)
    names = {"transformer": "wan_high_noise.safetensors", "transformer_2": "wan_low_noise.safetensors"}
    names = {part: name for part, name in names.items() if (wan / part).is_dir()}
    for part, name in names.items():
        state = {prefix + original_name(n): v.to(dtype or v.dtype) for n, v in weights_in(wan / part).items()}
        save_file(state, models / name)
    config: dict[str, Any] = read_json(wan / "vae" / "config.json")
    vae = {original_vae_name(name, config): value for name, value in weights_in(wan / "vae").items()}
    save_file(vae, models / "vae.safetensors")
    pieces = {"spiece_model": sentencepiece_of(wan / "tokenizer" / "tokenizer.json")}
    save_file(weights_in(wan / "text_encoder") | pieces, models / "umt5.safetensors")
    others = {"text_encoder": "umt5.safetensors", "vae": "vae.safetensors"}
    return write_json(models / "teacher.json", names | others)


def sparse_file(file: Path, shapes: dict[str, list[int]], first: bytes = b"") -> None:
    """Write a safetensors file in bf16 of a published size, whose zeros take no disk.

    Args:
        first: of a tensor `spiece_model` before all others.
    """
    header: dict[str, Any] = {}
    end = len(first)
    if first:
        header["spiece_model"] = {"dtype": "U8", "shape": [end], "data_offsets": [0, end]}
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(raw)) + raw + first)
        opened.truncate(8 + len(raw) + end)


def published_files(wan: KnownWan, models: Path) -> Path:
    """Write files of a published Wan's sizes, all zeros, with the embedded tokenizer; return the JSON."""
    names = ["wan_high_noise.safetensors", "wan_low_noise.safetensors"][: wan.networks]
    names = ["wan.safetensors"] if wan.networks == 1 else names
    for name in names:
        sparse_file(models / name, {original_name(n): s for n, s in wan.transformer.shapes.items()})
    configs = {part: wan.files[f"{part}/config.json"] for part in ("vae", "text_encoder")}
    with torch.device("meta"):
        vae, text = vae_of(configs["vae"]), text_encoder_of(configs["text_encoder"])
    of_vae = {original_vae_name(n, configs["vae"]): list(p.shape) for n, p in vae.named_parameters()}
    sparse_file(models / "vae.safetensors", of_vae)
    pieces = sentencepiece_of(TINY["tiny"] / "tokenizer" / "tokenizer.json").numpy().tobytes()
    of_text = {n: list(p.shape) for n, p in text.named_parameters()}
    sparse_file(models / "umt5.safetensors", of_text, pieces)
    others = {"text_encoder": "umt5.safetensors", "vae": "vae.safetensors"}
    return write_json(
        models / "teacher.json", dict(zip(("transformer", "transformer_2"), names, strict=False)) | others
    )
