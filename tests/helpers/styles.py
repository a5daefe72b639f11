"""LoRA files that change what a teacher draws, and teachers on disk with such a change in their weights."""

import re
import shutil
from pathlib import Path

import torch
from ranks import ROOT
from safetensors.torch import load_file, save_file

from wandistiller.utils.keyed_random import keyed_normal

RANK = 3
WEIGHTS = "diffusion_pytorch_model.safetensors"


def style(wan: Path, file: Path, *parts: str, seed: int = 0, metadata: dict[str, str] | None = None) -> Path:
    """Write a LoRA in diffusers' names for the layers of the first expert whose names have one of `parts`."""
    state = {}
    for name, value in load_file(wan / "transformer" / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and any(part in name for part in parts):
            outputs, inputs = value.shape
            state[f"transformer.{layer}.lora_A.weight"] = keyed_normal((RANK, inputs), seed, layer, "a")
            state[f"transformer.{layer}.lora_B.weight"] = 0.1 * keyed_normal(
                (outputs, RANK), seed, layer, "b"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, file, metadata)
    return file


def with_style(wan: Path, target: Path, *added: tuple[Path, float], experts: tuple[str, ...]) -> Path:
    """Copy a pipeline and add LoRA files, each with its strength, to the weights of experts: W + s B A."""
    shutil.copytree(wan, target)
    for expert in experts:
        weights = load_file(file := target / expert / WEIGHTS)
        for lora, strength in added:
            state = load_file(lora)
            for name in (key for key in state if key.endswith(".lora_A.weight")):
                layer = name.removesuffix(".lora_A.weight")
                change = strength * state[f"{layer}.lora_B.weight"] @ state[name]
                key = layer.removeprefix("transformer.") + ".weight"
                weights[key] = weights[key] + change.to(torch.float32)
        save_file(weights, file, {"format": "pt"})
    return target


def write_users_files(folder: Path) -> None:
    """Write the LoRA files that recipes of a style name: of 14B's and the embedded teacher's first layer."""
    key = "diffusion_model.blocks.0.self_attn.q.lora_{}.weight"
    recipes = (ROOT / "ds_configs" / "machines").glob("*_style.json")
    named = re.findall(r'"([\w.]+\.safetensors)"', "".join(file.read_text() for file in recipes))
    tiny = [f"runs/style_{of}/{side}.safetensors" for of in ("lora", "start") for side in ("high", "low")]
    for name, width in (dict.fromkeys(named, 5120) | dict.fromkeys(tiny, 128)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        a, b = torch.zeros(2, width), torch.zeros(width, 2)
        save_file({key.format("A"): a, key.format("B"): b}, folder / name)
