"""LoRA files of an image-to-video Wan: each layer's change is the one that diffusers' own loader makes."""

from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from small_wan import small_transformer
from torch import Tensor

from wandistiller.network.adapters import linear_layers
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.lora_files import read_lora
from wandistiller.wan.original_names import original_name
from wandistiller.wan.transformer_config import TransformerConfig

RANK, ALPHA = 4, 6.0
FILE = "pytorch_lora_weights.safetensors"


def transformer(*, of_text: bool = False) -> WanTransformer3DModel:
    return small_transformer(0, layers=2, **{} if of_text else {"image_dim": 24, "added_kv_proj_dim": 64})


def weights(model: WanTransformer3DModel) -> dict[str, Tensor]:
    """The weight of each linear layer, with or without adapters beside it."""
    layers = (name.removesuffix(".base_layer") for name in linear_layers(model) if ".lora_" not in name)
    named = ((name, model.get_submodule(name)) for name in layers)
    return {name: getattr(layer, "base_layer", layer).weight.detach().clone() for name, layer in named}


def all_shapes() -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in weights(transformer()).items()}


def by_diffusers(file: Path, *, alone: bool = False, of_text: bool = False) -> dict[str, Tensor]:
    """What diffusers' loader, and peft's merge, change of each linear layer's weight; zeros left out.

    Args:
        alone: by the loader of a transformer, not of a pipeline.
        of_text: into a network without the layers of images.
    """
    model = transformer(of_text=of_text)
    before = weights(model)
    if alone:
        model.load_lora_adapter(str(file.parent), prefix=None, weight_name=file.name)
    else:
        WanPipeline(None, None, None, None, model).load_lora_weights(file.parent, weight_name=file.name)
    for module in list(model.modules()):
        if hasattr(module, "lora_A"):
            module.merge()
    changes = {name: weight - before[name] for name, weight in weights(model).items()}
    return {name: change for name, change in changes.items() if change.any()}


def same_changes(file: Path, theirs: dict[str, Tensor], config: TransformerConfig | None = None) -> None:
    ours = read_lora(file, config).layers
    assert ours.keys() == theirs.keys()
    for layer, (a, b) in ours.items():
        torch.testing.assert_close(b @ a, theirs[layer], rtol=1e-5, atol=1e-6, msg=layer)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"to_q": 3, r"^proj_out": 5}},
        {"rank_pattern": {"to_q": 2}, "use_rslora": True},
    ],
)
@pytest.mark.parametrize("saved", ["of a pipeline", "of a transformer"])
def test_the_factor_of_a_file_of_diffusers_is_peft_s(
    saved: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model = transformer()
    targets = ["to_q", "add_k_proj", "proj_out", "ff.net.2"]
    made = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=False, **settings)
    model.add_adapter(made)
    if saved == "of a pipeline":
        config, state = model.peft_config["default"].to_dict(), get_peft_model_state_dict(model)
        WanPipeline.save_lora_weights(tmp_path, state, transformer_lora_adapter_metadata=config)
    else:
        model.save_lora_adapter(tmp_path)
    theirs = by_diffusers(tmp_path / FILE, alone=saved == "of a transformer")
    assert len(theirs) == 8
    same_changes(tmp_path / FILE, theirs)


def original_state(form: str, shapes: dict[str, torch.Size], *, alpha: bool = False) -> dict[str, Tensor]:
    """Factors of layers of these shapes, under the original Wan's names."""
    state = {}
    for layer, (outputs, inputs) in shapes.items():
        own = original_name(f"{layer}.").removesuffix(".")
        own = f"lora_unet_{own.replace('.', '_')}" if form == "kohya" else f"diffusion_model.{own}"
        down, up = ("lora_A", "lora_B") if form == "comfy" else ("lora_down", "lora_up")
        state[f"{own}.{down}.weight"] = keyed_normal((RANK, inputs), layer, "a")
        state[f"{own}.{up}.weight"] = keyed_normal((outputs, RANK), layer, "b")
        state |= {f"{own}.alpha": torch.tensor(ALPHA)} if alpha and layer.startswith("blocks.") else {}
    return state


@pytest.mark.parametrize(("form", "alpha"), [("comfy", False), ("older", True), ("kohya", True)])
def test_all_linear_layers_are_changed_as_by_diffusers(form: str, alpha: bool, tmp_path: Path) -> None:
    """Of kohya's those of blocks."""
    shapes = {n: shape for n, shape in all_shapes().items() if form != "kohya" or n.startswith("blocks.")}
    save_file(original_state(form, shapes, alpha=alpha), file := tmp_path / "lora.safetensors")
    theirs = by_diffusers(file)
    assert theirs.keys() == shapes.keys() and "blocks.1.attn2.add_v_proj" in theirs
    same_changes(file, theirs)


def test_a_file_taken_from_a_full_model_has_the_difference_of_its_head(tmp_path: Path) -> None:
    """As lightx2v publishes them: beside factors, differences of the head, of biases and of norms."""
    shapes, name = all_shapes(), "diffusion_model.{}"
    head = keyed_normal(tuple(shapes.pop("proj_out")), "head")
    state = original_state("older", shapes)
    left_out = {
        name.format("head.head.diff_b"): torch.ones(len(head)),
        name.format("blocks.0.self_attn.q.diff_b"): torch.ones(64),
        name.format("blocks.0.norm3.diff"): torch.ones(64),
        name.format("blocks.0.norm3.diff_b"): torch.ones(64),
    }
    state |= {name.format("head.head.diff"): head} | left_out
    save_file(state, file := tmp_path / "lora.safetensors")
    theirs = by_diffusers(file)
    torch.testing.assert_close(theirs["proj_out"], head, rtol=1e-5, atol=1e-6)
    same_changes(file, theirs)
    assert read_lora(file).left_out == sorted(left_out)


@pytest.mark.parametrize("form", ["comfy", "kohya"])
def test_a_lora_with_foreign_keys_adds_the_others_as_diffusers_does(form: str, tmp_path: Path) -> None:
    """As the published LoRAs of Wan2.2 for images have layers of Wan2.1, and extractions tables."""
    shapes = {name: shape for name, shape in all_shapes().items() if name.startswith("blocks.")}
    state = original_state(form, shapes, alpha=form == "kohya")
    if form == "comfy":
        state["diffusion_model.blocks.0.cross_attn.norm_k_img.diff"] = torch.ones(64)
    save_file(state, file := tmp_path / "lora.safetensors")
    theirs = by_diffusers(file, of_text=True)
    assert len(theirs) == 20 and not any("add_" in layer for layer in theirs)
    config = TransformerConfig.of(dict(transformer(of_text=True).config))
    same_changes(file, theirs, config)
    assert len(read_lora(file, config).left_out) == (9 if form == "comfy" else 12)


@pytest.mark.parametrize(
    ("layer", "shape", "text"),
    [
        ("blocks.0.attn1.to_q", (64, 32), "of shape [64, 32], and that is [64, 64] here"),
        ("blocks.2.attn1.to_q", (64, 64), "changes `blocks.2.attn1.to_q`, and the network here has 2 blocks"),
        ("blocks.1.attn2.add_k_proj", (64, 64), "add_k_proj`, and none of its layers is here"),
    ],
)
def test_a_lora_of_another_network_is_refused(
    layer: str, shape: tuple[int, int], text: str, tmp_path: Path
) -> None:
    save_file(original_state("comfy", {layer: torch.Size(shape)}), file := tmp_path / "lora.safetensors")
    config = TransformerConfig.of(dict(transformer(of_text=True).config))
    with pytest.raises(ConfigError) as raised:
        read_lora(file, config, weights=False)
    assert text in str(raised.value) and str(raised.value).endswith("Give one that was made for it.")
