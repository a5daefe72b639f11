"""LoRA files: the factors of their layers, and what is no such file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.lora_files import read_lora, require_finite

RANK, ALPHA = 4, 2.0
LAYERS = {
    "blocks.0.attn1.to_q": ("blocks.0.self_attn.q", (8, 8)),
    "blocks.0.attn2.to_out.0": ("blocks.0.cross_attn.o", (8, 8)),
    "blocks.0.attn2.add_k_proj": ("blocks.0.cross_attn.k_img", (8, 8)),
    "blocks.0.attn2.add_v_proj": ("blocks.0.cross_attn.v_img", (8, 8)),
    "blocks.1.ffn.net.0.proj": ("blocks.1.ffn.0", (12, 8)),
    "blocks.1.ffn.net.2": ("blocks.1.ffn.2", (8, 12)),
}
"""Names in diffusers -> those of the original Wan, and outputs and inputs."""


def factors(layer: str) -> tuple[Tensor, Tensor]:
    outputs, inputs = LAYERS[layer][1]
    return keyed_normal((RANK, inputs), layer, "a"), keyed_normal((outputs, RANK), layer, "b")


def made(folder: Path) -> Path:
    """A file for ComfyUI."""
    state = {}
    for layer, (original, _) in LAYERS.items():
        a, b = factors(layer)
        key = f"diffusion_model.{original}.lora_{{}}.weight".format
        state |= {key("A"): a, key("B"): b}
    save_file(state, folder / "file.safetensors")
    return folder / "file.safetensors"


def test_without_weights_the_shapes_are_known_from_the_header(tmp_path: Path) -> None:
    found = read_lora(made(tmp_path), weights=False)
    shapes = {layer: (b.shape[0], a.shape[1]) for layer, (a, b) in found.layers.items()}
    assert shapes == {layer: shape for layer, (_, shape) in LAYERS.items()}
    assert all(a.is_meta for a, _ in found.layers.values())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read as a .safetensors file"),
        ({"something": torch.zeros(1)}, "has no LoRA of a Wan transformer; its first key is something"),
        ({"diffusion_model.head": torch.zeros(1)}, "has no LoRA of a Wan transformer; its first key is"),
    ],
)
def test_another_file_is_refused_with_what_is_in_it(
    content: dict[str, Tensor] | None, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "other.safetensors"
    if content:
        save_file(content, file)
    else:
        file.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=text):
        read_lora(file, weights=False)


def test_alpha_of_a_part_may_be_under_the_name_of_the_file_s_own_keys(tmp_path: Path) -> None:
    a, b = torch.eye(2, 4), torch.eye(4, 2)
    key = "base_model.model.blocks.0.self_attn.q.lora_{}.weight"
    save_file({key.format("A"): a, key.format("B"): b}, tmp_path / "adapter_model.safetensors")
    settings = {"lora_alpha": 2, "r": 2, "alpha_pattern": {"self_attn.q": 16}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (found,) = read_lora(tmp_path / "adapter_model.safetensors").layers.values()
    torch.testing.assert_close(found.b @ found.a, 16 / 2 * (b @ a))


@pytest.mark.parametrize(("part", "value"), [("lora_A", torch.nan), ("lora_B", -torch.inf)])
def test_numbers_that_are_not_finite_are_named_by_file_and_tensor(
    part: str, value: float, tmp_path: Path
) -> None:
    state = load_file(file := made(tmp_path))
    state[key := f"diffusion_model.blocks.0.self_attn.q.{part}.weight"][0, 1] = value
    save_file(state, file)
    with pytest.raises(ConfigError) as raised:
        require_finite(file)
    assert str(raised.value).startswith(f"{file}: tensor `{key}` holds numbers that are not finite.")


@pytest.mark.parametrize("expert", Expert)
def test_of_a_file_of_both_experts_each_has_its_own_keys(expert: Expert, tmp_path: Path) -> None:
    state = {}
    for one in Expert:
        for layer in LAYERS:
            a, b = factors(layer)
            key = f"{one.value}.{layer}.lora_{{}}.weight".format
            state |= {key("A"): a, key("B"): b * (2 if one is Expert.LOW_NOISE else 1)}
    settings = {"transformer.lora_alpha": RANK, "transformer_2.lora_alpha": 2 * RANK}
    save_file(state, file := tmp_path / "it.safetensors", {"lora_adapter_metadata": json.dumps(settings)})
    found = read_lora(file, expert=expert)
    assert found.left_out == [] and found.layers.keys() == LAYERS.keys()
    for layer, (a, b) in found.layers.items():
        down, up = factors(layer)
        torch.testing.assert_close(b @ a, (4 if expert is Expert.LOW_NOISE else 1) * (up @ down))
