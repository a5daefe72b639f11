"""The LoRA files of a run, by the rules of names of diffusers, ComfyUI and musubi-tuner: no key is left."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from ranks import wandistiller
from recipes import train
from safetensors.torch import load_file
from styles import style
from torch import Tensor, nn

from wandistiller.experts import Expert
from wandistiller.export.source import read_source
from wandistiller.wan.original_names import original_name

LORA = {"rank": 4, "alpha": 2, "ranks": {"ffn": 2}, "targets": ["to_q", "to_k", "to_v", "to_out", "ffn"]}
COMFY = ["lora_high_noise.safetensors", "lora_low_noise.safetensors"]
DIFFUSERS = ["pytorch_lora_weights.safetensors", "pytorch_lora_weights_2.safetensors"]
PER_BLOCK = 10
"""Four maps of two attentions, and two of the feed-forward layer."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Path:
    folder = tmp_path_factory.mktemp("readers")
    output = train(
        folder,
        wan2,
        ranks=1,
        student_config={"experts": "two"},
        lora=LORA,
        max_steps=3,
        shift=7.0,
        sample_prompts=[],
    )
    wandistiller("export", "--checkpoint", output, "--output", output / "lora", "--adapter")
    return output


@pytest.fixture(params=list(zip(Expert, COMFY, DIFFUSERS, strict=True)), ids=[e.value for e in Expert])
def files(request: pytest.FixtureRequest, run: Path) -> tuple[Expert, Path, Path]:
    """Expert, the file that the run ended with, and the one for diffusers."""
    expert, comfy, folder = request.param
    return expert, run / comfy, run / "lora" / folder


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize("kind", ["comfy", "diffusers"])
def test_diffusers_finds_every_key_and_misses_none(
    kind: str, files: tuple[Expert, Path, Path], wan2: Path, said_by_diffusers: Callable[[], str]
) -> None:
    expert, *both = files
    file, second = both[kind == "diffusers"], expert is Expert.LOW_NOISE
    pipe = WanPipeline.from_pretrained(wan2)
    pipe.load_lora_weights(file.parent, weight_name=file.name, load_into_transformer_2=second)
    assert "keys" not in said_by_diffusers()
    found, stored = adapted(getattr(pipe, expert.value)), load_file(file)
    assert len(found) == 4 * PER_BLOCK and len(stored) == 2 * len(found)
    assert all(module.lora_B["default_0"].weight.any() for module in found.values())


def originals(wan: Path, expert: Expert) -> dict[str, Tensor]:
    """The teacher's weights under the original names, as ComfyUI and musubi-tuner have them."""
    return renamed(WanTransformer3DModel.from_pretrained(wan, subfolder=expert.value))


def renamed(model: nn.Module) -> dict[str, Tensor]:
    return {original_name(name): p.detach() for name, p in model.named_parameters()}


def by_comfyui(lora: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple[set[str], dict[str, Tensor]]:
    """The keys that ComfyUI reads, and the weights that it makes of them.

    Source of the rules: comfy/lora.py of ComfyUI, `model_lora_keys_unet` (a layer is known as
    diffusion_model.NAME, and as lora_unet_NAME with _ for each dot) and `load_lora`;
    comfy/weight_adapter/lora.py, `LoRAAdapter` (its pairs of names; the factor is alpha / rank, 1 without
    alpha).
    """
    read, changed = set(), dict(weights)
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        for prefix in (f"diffusion_model.{layer}", f"lora_unet_{layer.replace('.', '_')}"):
            for up, down in (("lora_up", "lora_down"), ("lora_B", "lora_A")):
                pair = f"{prefix}.{up}.weight", f"{prefix}.{down}.weight"
                if name.endswith(".weight") and pair[0] in lora:
                    alpha = lora.get(f"{prefix}.alpha")
                    b, a = (lora[key].float() for key in pair)
                    changed[name] = weight + (1.0 if alpha is None else alpha.item() / len(a)) * (b @ a)
                    read |= {*pair, f"{prefix}.alpha"} & lora.keys()
    return read, changed


def by_musubi(lora: dict[str, Tensor], weights: dict[str, Tensor]) -> tuple[set[str], dict[str, Tensor]]:
    """The same of musubi-tuner, after its convert_lora.py with `--target default`; its names there.

    Source of the rules: src/musubi_tuner/convert_lora.py, `convert_from_diffusers` (what follows
    diffusion_model. is joined by _, lora_A becomes lora_down, lora_B lora_up, and a missing alpha the rank);
    utils/lora_utils.py, `load_safetensors_with_lora_and_fp8`.
    """
    converted = {}
    for key, value in lora.items():
        prefix, _, layer = key.removesuffix(".weight").partition(".")
        assert prefix == "diffusion_model"
        layer, _, part = layer.rpartition(".")
        name = f"lora_unet_{layer.replace('.', '_')}"
        converted[f"{name}.{ {'lora_A': 'lora_down', 'lora_B': 'lora_up'}[part] }.weight"] = value
        if part == "lora_A":
            converted[f"{name}.alpha"] = torch.tensor(len(value))
    return by_comfyui(converted, weights)


def test_comfyui_and_musubi_tuner_read_every_key_and_make_the_exported_student_of_the_teacher(
    files: tuple[Expert, Path, Path], wan2: Path, run: Path
) -> None:
    expert, file, _ = files
    lora, weights = load_file(file), originals(wan2, expert)
    read, changed = by_comfyui(lora, weights)
    assert read == lora.keys() and len(read) == 2 * 4 * PER_BLOCK
    assert {key.rsplit(".", 2)[1] for key in read} == {"lora_A", "lora_B"}
    musubi_read, musubi_changed = by_musubi(lora, weights)
    assert len(musubi_read) == 3 * 4 * PER_BLOCK
    assert "lora_unet_blocks_0_self_attn_q.lora_down.weight" in musubi_read
    student = renamed(dict(read_source(run).networks(torch.float32))[expert.value])
    for name, weight in changed.items():
        assert torch.equal(musubi_changed[name], weight)
        if f"diffusion_model.{name.removesuffix('.weight')}.lora_A.weight" in lora:
            difference = (weight - weights[name]).norm()
            assert difference > 0 and (weight - student[name]).norm() < 0.01 * difference, name  # in bf16


@pytest.mark.slow
def test_comfyui_makes_of_a_styled_few_step_run_what_its_file_for_diffusers_does(
    tmp_path: Path, wan2: Path
) -> None:
    file = style(wan2, tmp_path / "style.safetensors", "attn2.to_k", "ffn")
    few = {"objective": {"name": "consistency", "edges": 4}, "shift": 7.0, "max_steps": 8}
    given = {"student_config": {"experts": "two"}, "lora": LORA, "teacher_lora": f"both={file}"}
    output = train(tmp_path, wan2, ranks=1, **given, **few)
    wandistiller("export", "--checkpoint", output, "--output", output / "lora", "--adapter")
    for expert, comfy, diffusers in zip(Expert, COMFY, DIFFUSERS, strict=True):
        lora, weights = load_file(output / comfy), originals(wan2, expert)
        read, changed = by_comfyui(lora, weights)
        other = load_file(output / "lora" / diffusers)
        layers = {name.removesuffix(".lora_A.weight") for name in other if name.endswith(".lora_A.weight")}
        assert read == lora.keys() and len(layers) == 4 * PER_BLOCK
        for layer in layers:
            name = original_name(layer.removeprefix("transformer.") + ".weight")
            b, a = (other[f"{layer}.lora_{part}.weight"].float() for part in "BA")
            assert torch.equal(changed[name], weights[name] + b @ a), name
            assert not torch.equal(changed[name], weights[name]), name
