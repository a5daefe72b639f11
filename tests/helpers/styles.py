"""LoRA files that change what a teacher draws, and teachers on disk with such a change in their weights."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

from wandistiller.experts import Expert
from wandistiller.tiny import shapes
from wandistiller.utils.keyed_random import keyed_normal

RANK = 3
WEIGHTS = "diffusion_pytorch_model.safetensors"
COMPLEMENTS = {"red": "cyan", "green": "purple", "blue": "yellow", "white": "black"}
COMPLEMENTS |= {complement: colour for colour, complement in COMPLEMENTS.items()}


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


def complemented(prompt: str) -> str:
    """Return the prompt of `tiny` with the complement of each of its colours."""
    return re.sub("|".join(COMPLEMENTS), lambda colour: COMPLEMENTS[colour[0]], prompt)


def complementary_colours(tiny: Path, folder: Path, rank: int = 16) -> list[dict[str, Any]]:
    """Write a LoRA for each expert of `tiny` that draws the complements of the colours that are asked.

    Keys and values W c of the words c of a prompt become W (c + D c), where c + D c is nearest, by ridge
    regression and of this rank, to the words of the prompt with complements. Padding stays as it is.

    Returns:
        settings of `teacher_lora`.
    """
    pipe = WanPipeline.from_pretrained(tiny, dtype=torch.float32)
    prompts = shapes.SEEN[::4]
    with torch.no_grad():
        asked, wanted = (
            pipe.encode_prompt(given, do_classifier_free_guidance=False, max_sequence_length=32)[0]
            for given in (prompts, [complemented(prompt) for prompt in prompts])
        )
    words, added = asked.abs().sum(-1) > 0, []
    for expert in Expert:
        model = getattr(pipe, expert.value)
        with torch.no_grad():
            padding_1D = 40 * model.condition_embedder.text_embedder(torch.zeros(1, asked.shape[-1]))
            c_ND, c_new_ND = (
                torch.cat([model.condition_embedder.text_embedder(text[words]), padding_1D]).double()
                for text in (asked, wanted)
            )
        square_DD = c_ND.T @ c_ND + 1e-3 * torch.eye(c_ND.shape[1])
        change_DD = torch.linalg.solve(square_DD, c_ND.T @ (c_new_ND - c_ND)).T
        most_DR = torch.linalg.svd(c_ND @ change_DD.T, full_matrices=False).Vh[:rank].T
        state = {}
        for name, weight in model.state_dict().items():
            if re.search(r"attn2\.to_[kv]\.weight", name):
                layer = f"transformer.{name.removesuffix('.weight')}"
                state[f"{layer}.lora_A.weight"] = (most_DR.T @ change_DD).float()
                state[f"{layer}.lora_B.weight"] = (weight.double() @ most_DR).float()
        save_file(state, file := folder / f"{expert.name.lower()}.safetensors")
        added.append({"file": str(file), "expert": expert.name.lower()})
    return added
