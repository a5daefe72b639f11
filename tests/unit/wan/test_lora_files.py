"""LoRA files: keys in every spelling that trainers have are the same layers; what is no LoRA is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.lora_files import left_out_words, read_lora, require_finite

RANK, ALPHA = 4, 2.0
LAYERS = {
    "blocks.10.attn1.to_q": ("blocks.10.self_attn.q", (8, 8)),
    "blocks.1.attn2.to_out.0": ("blocks.1.cross_attn.o", (8, 8)),
    "blocks.1.attn2.add_k_proj": ("blocks.1.cross_attn.k_img", (8, 8)),
    "blocks.1.ffn.net.0.proj": ("blocks.1.ffn.0", (12, 8)),
    "condition_embedder.image_embedder.ff.net.2": ("img_emb.proj.3", (8, 8)),
    "condition_embedder.text_embedder.linear_1": ("text_embedding.0", (8, 6)),
    "condition_embedder.time_embedder.linear_2": ("time_embedding.2", (8, 8)),
    "condition_embedder.time_proj": ("time_projection.1", (48, 8)),
    "proj_out": ("head.head", (4, 8)),
}
"""Names in diffusers -> those of the original Wan, and outputs and inputs."""
PEFT, KOHYA = ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")
NAMED = ("lora_A.default.weight", "lora_B.default.weight")
SPELLINGS = [
    ("{original}", PEFT),
    ("{original}", NAMED),
    ("pipe.dit.{original}", NAMED),
    ("{diffusers}", KOHYA),
    ("transformer.{diffusers}", PEFT),
    ("transformer.{diffusers}", KOHYA),
    ("transformer.{diffusers}", ("lora.down.weight", "lora.up.weight")),
    ("transformer.{original}", PEFT),
    ("diffusion_model.{original}", KOHYA),
    ("diffusion_model.{diffusers}", PEFT),
    ("model.diffusion_model.{original}", KOHYA),
    ("model.{original}", PEFT),
    ("base_model.model.{diffusers}", PEFT),
    ("base_model.model.{original}", NAMED),
    ("base_model.model.transformer.{diffusers}", PEFT),
    ("lora_unet_{original_}", KOHYA),
    ("lora_unet_{diffusers_}", KOHYA),
    ("lora_unet__{original_}", KOHYA),
    ("lora_transformer_{diffusers_}", KOHYA),
    ("lycoris_{diffusers_}", KOHYA),
]


def factors(layer: str) -> tuple[Tensor, Tensor]:
    outputs, inputs = LAYERS[layer][1]
    return keyed_normal((RANK, inputs), layer, "a"), keyed_normal((outputs, RANK), layer, "b")


def spelled(name: str, ends: tuple[str, str], alpha: float | None = None) -> dict[str, Tensor]:
    state = {}
    for layer, (original, _) in LAYERS.items():
        plain = {"diffusers": layer, "original": original}
        own = name.format(**plain, **{f"{key}_": value.replace(".", "_") for key, value in plain.items()})
        state |= {f"{own}.{end}": value for end, value in zip(ends, factors(layer), strict=True)}
        state |= {f"{own}.alpha": torch.tensor(alpha)} if alpha else {}
    return state


STATE = spelled("transformer.{diffusers}", PEFT)
QUERY, LAST = "transformer.blocks.10.attn1.to_q", "transformer.proj_out"


def written(folder: Path, state: dict[str, Tensor], settings: Any = None) -> Path:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    save_file(state, folder / "lora.safetensors", {"lora_adapter_metadata": text} if settings else None)
    return folder / "lora.safetensors"


def read(file: Path) -> dict[str, Tensor]:
    return {layer: b @ a for layer, (a, b) in read_lora(file).layers.items()}


def refused(file: Path) -> str:
    """What is said of a file of which the header alone is read."""
    with pytest.raises(ConfigError) as error:
        read_lora(file, weights=False)
    (problem,) = error.value.problems
    assert problem.startswith(f"{file}: ")
    return problem.removeprefix(f"{file}: ")


@pytest.mark.parametrize("alpha", [None, ALPHA])
@pytest.mark.parametrize(("name", "ends"), SPELLINGS)
def test_every_spelling_of_a_layer_is_that_layer_with_its_alpha(
    name: str, ends: tuple[str, str], alpha: float | None, tmp_path: Path
) -> None:
    file = written(tmp_path, spelled(name, ends, alpha))
    found, factor = read(file), alpha / RANK if alpha else 1.0
    assert found.keys() == LAYERS.keys() and read_lora(file).left_out == []
    for layer, change in found.items():
        a, b = factors(layer)
        torch.testing.assert_close(change, factor * (b @ a))


@pytest.mark.parametrize(
    ("name", "ends", "metadata", "factor"),
    [
        ("diffusion_model.{original}", PEFT, {"lora_alpha": "2.0"}, ALPHA / RANK),
        ("lora_unet_{original_}", KOHYA, {"ss_network_alpha": "2.0"}, ALPHA / RANK),
        ("diffusion_model.{original}", PEFT, {"ss_network_alpha": "2.0"}, 1),
    ],
    ids=["of peft's name", "of kohya's trainers", "of their converter, which multiplies by it"],
)
def test_an_alpha_in_the_header_alone_is_a_factor_as_the_program_that_wrote_it_means(
    name: str, ends: tuple[str, str], metadata: dict[str, str], factor: float, tmp_path: Path
) -> None:
    save_file(spelled(name, ends), file := tmp_path / "lora.safetensors", metadata)
    for layer, change in read(file).items():
        a, b = factors(layer)
        torch.testing.assert_close(change, factor * (b @ a))


def test_a_tensor_alpha_counts_before_the_settings(tmp_path: Path) -> None:
    state = STATE | {f"{QUERY}.alpha": torch.tensor(ALPHA)}
    found = read(written(tmp_path, state, {"transformer.r": RANK, "transformer.lora_alpha": 1}))
    (a, b), (c, d) = factors("blocks.10.attn1.to_q"), factors("proj_out")
    torch.testing.assert_close(found["blocks.10.attn1.to_q"], ALPHA / RANK * (b @ a))
    torch.testing.assert_close(found["proj_out"], 1 / RANK * (d @ c))


@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (8, 8)])
def test_the_difference_of_a_layer_s_weight_is_added_as_it_is(shape: tuple[int, int], tmp_path: Path) -> None:
    difference = keyed_normal(shape, "difference")
    file = written(tmp_path, {"diffusion_model.time_projection.1.diff": difference})
    found, layer = read(file), "condition_embedder.time_proj"
    assert found.keys() == {layer} and torch.equal(found[layer], difference)
    change = read_lora(file, weights=False).layers[layer]
    assert change.rank == min(shape) and change.a.is_meta and change.b.is_meta


def test_what_changes_no_weight_of_a_linear_layer_is_counted(tmp_path: Path) -> None:
    more = ["blocks.0.norm3.diff", "blocks.0.norm3.diff_b", "blocks.0.ffn.0.diff_b", "patch_embedding.diff"]
    more += ["patch_embedding.lora_A.weight", "blocks.0.modulation.diff_param"]
    more = [f"diffusion_model.{key}" for key in more] + [f"{QUERY}.lora_B.bias", "lora_te1_x.lora_up.weight"]
    file = written(tmp_path, STATE | {key: torch.ones(8) for key in more})
    left_out = read_lora(file).left_out
    assert left_out == sorted(more)
    assert left_out_words(left_out) == (
        "8 of its keys change no weight of a linear layer that is here and are left out, such as "
        "diffusion_model.blocks.0.ffn.0.diff_b"
    )


@pytest.mark.parametrize(
    ("key", "method"),
    [
        (f"{QUERY}.lora_magnitude_vector", "DoRA"),
        (f"{QUERY}.dora_scale", "DoRA"),
        ("lora_unet_blocks_2_self_attn_q.dora_scale", "DoRA"),
        ("transformer.blocks.2.attn1.to_q.lokr_w1", "LoKr"),
        ("diffusion_model.blocks.2.self_attn.q.hada_w1_a", "LoHa"),
        (f"{QUERY}.lora_mid.weight", "LoRA of convolutions"),
        (f"{LAST}.scale_weight", "weights in 8 bits with a scale"),
    ],
)
def test_a_key_of_another_method_is_refused(key: str, method: str, tmp_path: Path) -> None:
    text = f"`{key}` is of {method}, and only LoRA of linear layers is read. Give a LoRA, or merge it"
    assert refused(written(tmp_path, STATE | {key: torch.ones(8, 8)})).startswith(text)
    assert refused(written(tmp_path, {key: torch.ones(8, 8)})).startswith(text)


@pytest.mark.parametrize("name", ["use_dora", "transformer.use_dora"])
def test_settings_of_dora_are_refused(name: str, tmp_path: Path) -> None:
    text = "its metadata `lora_adapter_metadata` has `use_dora`, and only LoRA is read"
    assert refused(written(tmp_path, STATE, {name: True})).startswith(text)


@pytest.mark.parametrize("lone", ["lora_A", "lora_B"])
@pytest.mark.parametrize(
    ("name", "ends"), [("transformer.{diffusers}", PEFT), ("diffusion_model.{original}", PEFT)]
)
def test_a_factor_without_the_other_is_refused(
    name: str, ends: tuple[str, str], lone: str, tmp_path: Path
) -> None:
    state, other = spelled(name, ends), {"lora_A": "lora_B", "lora_B": "lora_A"}[lone]
    key = next(key for key in state if lone in key)
    del state[key.replace(lone, other)]
    text = f"of a layer it has `{key}`, which is not both factors of a LoRA, nor a difference alone."
    assert refused(written(tmp_path, state)).startswith(text)


@pytest.mark.parametrize("settings", ["no JSON", "[1]", "1"])
def test_settings_that_are_no_object_are_refused(settings: str, tmp_path: Path) -> None:
    text = refused(written(tmp_path, STATE, settings))
    assert text.startswith("its metadata `lora_adapter_metadata` is no JSON object.")


@pytest.mark.parametrize(
    "settings", [{"lora_alpha": "two"}, {"lora_alpha": 1, "alpha_pattern": [2]}, {"alpha_pattern": {"(": 2}}]
)
def test_settings_whose_alpha_is_no_number_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    assert "which are no numbers" in refused(written(tmp_path, STATE, settings))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({f"{LAST}.lora_B.weight": torch.ones(4, 3)}, "their ranks differ"),
        ({f"{LAST}.lora_B.weight": torch.ones(4, 4, 1)}, f"`{LAST}.lora_B.weight` is [4, 4, 1]"),
        ({f"{LAST}.alpha": torch.ones(2)}, f"`{LAST}.alpha` is no number"),
        ({"diffusion_model.head.head.lora_up.weight": torch.ones(4, 4)}, "are of one layer. Keep one"),
    ],
)
def test_what_cannot_be_added_is_named_from_the_header(
    changed: dict[str, Tensor], text: str, tmp_path: Path
) -> None:
    found = refused(written(tmp_path, STATE | changed))
    assert text in found and re.search(r"\. (Give|Keep|Fetch) [^.]+\.$", found)


def test_without_weights_the_shapes_are_known_from_the_header(tmp_path: Path) -> None:
    found = read_lora(written(tmp_path, STATE), weights=False).layers
    assert {layer: (b.shape[0], a.shape[1]) for layer, (a, b) in found.items()} == {
        layer: shape for layer, (_, shape) in LAYERS.items()
    }
    assert all(a.is_meta for a, _ in found.values())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no weights", "cannot be read as a .safetensors file"),
        ({"something": torch.zeros(1)}, "has no LoRA of a Wan transformer; its first key is something"),
        ({"diffusion_model.head": torch.zeros(1)}, "has no LoRA of a Wan transformer; its first key is"),
    ],
)
def test_another_file_is_refused_with_what_is_in_it(
    content: bytes | dict[str, Tensor], text: str, tmp_path: Path
) -> None:
    file = tmp_path / "other.safetensors"
    file.write_bytes(content) if isinstance(content, bytes) else save_file(content, file)
    assert text in refused(file)


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
    key = f"{QUERY}.{part}.weight"
    file = written(tmp_path, STATE | {key: torch.full_like(STATE[key], value)})
    with pytest.raises(ConfigError) as raised:
        require_finite(file)
    assert str(raised.value).startswith(f"{file}: tensor `{key}` holds numbers that are not finite.")


@pytest.mark.parametrize("expert", Expert)
def test_of_a_file_of_both_experts_each_has_its_own_keys(expert: Expert, tmp_path: Path) -> None:
    high, low = (spelled(f"{one.value}.{{diffusers}}", PEFT) for one in Expert)
    low = {key: value * (2 if "lora_B" in key else 1) for key, value in low.items()}
    settings = {"transformer.lora_alpha": RANK, "transformer_2.lora_alpha": 2 * RANK}
    found = read_lora(written(tmp_path, high | low, settings), expert=expert)
    assert found.left_out == [] and found.layers.keys() == LAYERS.keys()
    for layer, (a, b) in found.layers.items():
        down, up = factors(layer)
        torch.testing.assert_close(b @ a, (4 if expert is Expert.LOW_NOISE else 1) * (up @ down))
