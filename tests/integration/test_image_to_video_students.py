"""Smaller students and adapters of image-to-video Wans: cut, written, and opened by stock diffusers."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
from image_wans import A14B, BOTH_ENDS, ENGINE, TI2V, WAN21, Wans
from ranks import wandistiller
from recipes import recipe
from safetensors.torch import load_file
from slow_cases import slow_but
from small_wan import IMAGE_FORMS, small_transformer
from torch import Tensor, nn

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.export.formats.original import original_state
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.lora_files import read_lora
from wandistiller.wan.transformer import velocity
from wandistiller.wan.transformer_config import TransformerConfig

HALF = {"num_layers": 2, "num_attention_heads": 1, "ffn_dim": 0.5, "keep_layers": "importance"}
PUBLISHED = {f"img_emb.proj.{n}.{kind}" for n in (0, 1, 3, 4) for kind in ("weight", "bias")}
PUBLISHED |= {f"blocks.0.cross_attn.{m}_img.{kind}" for m in "kv" for kind in ("weight", "bias")}
PUBLISHED |= {"blocks.0.cross_attn.norm_k_img.weight", "img_emb.emb_pos"}
"""What the published files of Wan2.1 I2V and FLF2V have beside those of Wan2.1 T2V, of one block."""
IMAGE_TARGETS = ["to_q", "to_k", "to_v", "to_out", "add_k_proj", "add_v_proj", "image_embedder"]
FLAGS = ["--dtype", "float32"]
EXPERTS = ["transformer", "transformer_2"]


@pytest.fixture(scope="module")
def wans(tmp_path_factory: pytest.TempPathFactory) -> Wans:
    return Wans(tmp_path_factory.mktemp("image_students"))


@pytest.fixture(scope="module", params=slow_but([], IMAGE_FORMS))
def cut(request: pytest.FixtureRequest, wans: Wans) -> tuple[str, Path]:
    """A student of half the layers, heads and units, after a step."""
    more = {"student_config": HALF | {"experts": "all"}, "objective": "velocity"}
    more |= {"max_steps": 1}
    output = wans.train(request.param, f"cut {request.param}", **more)
    for name, form in (("folder", "diffusers"), ("one.safetensors", "original")):
        flags = ["--checkpoint", output, "--output", output / name, "--format", form]
        wandistiller("export", *flags, *FLAGS)
    return request.param, output


@torch.no_grad()
def predict(model: nn.Module, expands_time: bool = False) -> Tensor:
    """Velocities v_BCFHW of random states."""
    config = TransformerConfig.of({**model.config, "expands_time": expands_time})
    blank = config.blank_state((config.out_channels, 2, 4, 8))
    values = [keyed_normal(tuple(t.shape), number).sigmoid() for number, t in enumerate(blank.tensors())]
    return velocity(model.eval(), blank.with_tensors(values))


def opened(output: Path, name: str, file: Path) -> WanTransformer3DModel:
    """Open one of the original files by the lines of its card."""
    card = (output / "one.card" / "README.md").read_text()
    lines = re.search(r"```python\n(from diffusers import WanTransformer3DModel.*?)```", card, re.DOTALL)
    found: dict[str, Any] = {}
    here = os.getcwd()
    os.chdir(output)
    try:
        exec(lines[1], found)
    finally:
        os.chdir(here)
    assert file.is_file()
    return found[name]


def test_a_student_of_half_of_everything_opens_from_original_names_as_from_its_folder(
    cut: tuple[str, Path],
) -> None:
    form, output = cut
    stored = sorted(output.glob("one*.safetensors"))
    assert len(stored) == IMAGE_FORMS[form]["experts"]
    for name, file in zip(EXPERTS, stored, strict=False):
        wanted = WanTransformer3DModel.from_pretrained(output / "folder", subfolder=name)
        found = opened(output, name, file)
        state = wanted.state_dict()
        assert found.state_dict().keys() == state.keys()
        assert all(torch.equal(value, state[key]) for key, value in found.state_dict().items())
        outputs = predict(found, form == TI2V), predict(wanted, form == TI2V)
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)  # mapped weights lie at other addresses
        sizes = wanted.config
        assert (sizes.num_layers, sizes.num_attention_heads, sizes.ffn_dim) == (2, 1, 48)
        assert sizes.in_channels == (48 if form == TI2V else 36)


@pytest.mark.parametrize("form", [WAN21, BOTH_ENDS])
def test_original_names_of_given_frames_are_those_of_the_published_files(form: str) -> None:
    sizes = {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": 64}
    model = small_transformer(0, 1, **sizes, **({"pos_embed_seq_len": 10} if form == BOTH_ENDS else {}))
    names = set(original_state(model.state_dict(), False))
    wanted = PUBLISHED if form == BOTH_ENDS else PUBLISHED - {"img_emb.emb_pos"}
    assert {n for n in names if "img" in n} == wanted
    assert not {n for n in names if "add_" in n or "condition" in n}


@pytest.fixture(scope="module", params=slow_but([], [A14B, WAN21]))
def adapters(request: pytest.FixtureRequest, wans: Wans) -> tuple[str, Path]:
    """A run of the teacher's adapters on a streamed base, with exports."""
    targets = IMAGE_TARGETS if request.param == WAN21 else IMAGE_TARGETS[:4]
    more = {
        "lora": {"rank": 4, "alpha": 2.0, "targets": targets},
        "student_config": {"experts": "all"},
        "teacher_deepspeed_config": "stream",
        "objective": "velocity",
        "max_steps": 4,  # by the draws of two, one expert learns nothing
        "deepspeed_config": ENGINE | {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}},
    }
    output = wans.train(request.param, f"lora {request.param}", **more)
    comfy = ["--adapter", "--format", "original"]
    for name, flags in (("merged", []), ("folder", ["--adapter"]), ("comfy.safetensors", comfy)):
        wandistiller("export", "--checkpoint", output, "--output", output / name, *flags, *FLAGS)
    return request.param, output


def files(output: Path, style: str) -> list[Path]:
    """The LoRA files of each expert, high noise first."""
    return sorted(output.glob("comfy*.safetensors" if style == "comfy" else "folder/*.safetensors"))


@pytest.mark.parametrize("style", ["comfy", "folder"])
def test_the_stock_pipeline_with_the_lora_has_the_student_s_velocities(
    style: str, adapters: tuple[str, Path], wans: Wans, said_by_diffusers: Callable[[], str]
) -> None:
    form, output = adapters
    pipe = WanImageToVideoPipeline.from_pretrained(wans[form], torch_dtype=torch.float32)
    before = {name: predict(getattr(pipe, name)) for name in EXPERTS[: len(files(output, style))]}
    for second, file in enumerate(files(output, style)):
        pipe.load_lora_weights(file.parent, weight_name=file.name, load_into_transformer_2=bool(second))
    assert "keys" not in said_by_diffusers()
    assert len(before) == IMAGE_FORMS[form]["experts"]
    for name, v_BCFHW in before.items():
        wanted = predict(WanTransformer3DModel.from_pretrained(output / "merged", subfolder=name))
        found = predict(getattr(pipe, name))
        assert (found - wanted).norm() < 1e-5 * wanted.norm() and (v_BCFHW - wanted).norm() > 1e-3


def test_adapters_of_given_frames_have_the_names_of_each_reader(adapters: tuple[str, Path]) -> None:
    form, output = adapters
    (comfy, *_), (folder, *_) = files(output, "comfy"), files(output, "folder")
    ours, theirs = (
        {key.removesuffix(".lora_A.weight") for key in load_file(file) if ".lora_A." in key}
        for file in (comfy, folder)
    )
    attention, image = "transformer.blocks.0.attn2", "transformer.condition_embedder.image_embedder"
    named = {
        f"{attention}.add_k_proj",
        f"{attention}.add_v_proj",
        f"{image}.ff.net.0.proj",
        f"{image}.ff.net.2",
    }
    renamed = {f"diffusion_model.{n}" for n in ("img_emb.proj.1", "img_emb.proj.3")}
    renamed |= {f"diffusion_model.blocks.0.cross_attn.{m}_img" for m in "kv"}
    if form == WAN21:
        assert named <= theirs and renamed <= ours
    both = [read_lora(file) for file in (comfy, folder)]
    assert not both[0].left_out and both[0].layers.keys() == both[1].layers.keys()
    assert {f"transformer.{layer}" for layer in both[0].layers} == theirs
    for layer, (a, b) in both[0].layers.items():
        torch.testing.assert_close(b @ a, both[1].layers[layer].b @ both[1].layers[layer].a)


def test_adapters_of_one_of_two_maps_of_given_frames_are_refused(wans: Wans) -> None:
    lora = {"targets": ["to_q", "add_k_proj"]}
    given = recipe(wans.folder, wans[WAN21], **wans.settings(WAN21, lora=lora, student_config={}))
    with pytest.raises(ConfigError, match="adapters of both add_k_proj and add_v_proj, or of neither"):
        read_job(RunConfig(**given | {"output_dir": "out"}), 1)
