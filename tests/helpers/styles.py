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


IN_BLOCKS = {f"blocks.0.{of}.{layer}": (5120, 5120) for of in ("self_attn", "cross_attn") for layer in "qkvo"}
IN_BLOCKS |= {"blocks.0.ffn.0": (5120, 13824), "blocks.0.ffn.2": (13824, 5120)}
"""Layers in LightX2V's files for A14B, by inputs and outputs. Their length says so: rank 64."""
OUTSIDE = {"text_embedding.0": (4096, 5120), "text_embedding.2": (5120, 5120), "head.head": (5120, 64)}
OUTSIDE |= {"time_embedding.0": (256, 5120), "time_embedding.2": (5120, 5120)}
OUTSIDE |= {"time_projection.1": (5120, 30720)}
"""Further ones in the file for Wan2.1 14B, beside differences of biases and norms; its length says so too."""


def write_users_files(folder: Path) -> None:
    """Write the LoRA files that recipes of a style name: of 14B's first block, and the embedded teacher's."""
    recipes = (ROOT / "ds_configs" / "machines").glob("*_style.json")
    named = re.findall(r'"([\w.]+\.safetensors)"', "".join(file.read_text() for file in recipes))
    layers = {name: IN_BLOCKS | (OUTSIDE if "cfg_step_distill" in name else {}) for name in named}
    for of in ("lora", "start"):
        for side in ("high", "low"):
            layers[f"runs/style_{of}/{side}.safetensors"] = {"blocks.0.self_attn.q": (128, 128)}
    for name, sizes in layers.items():
        state = {}
        for layer, (inputs, outputs) in sizes.items():
            state[f"diffusion_model.{layer}.lora_down.weight"] = torch.zeros(2, inputs)
            state[f"diffusion_model.{layer}.lora_up.weight"] = torch.zeros(outputs, 2)
            beside = {"diff_b": torch.zeros(outputs)} if "head.head" in sizes else {"alpha": torch.ones(())}
            state |= {f"diffusion_model.{layer}.{ending}": value for ending, value in beside.items()}
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(state, folder / name)
