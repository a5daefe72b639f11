"""What an export leaves opens elsewhere: original-Wan files, LoRA files of both styles, the card."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from ranks import run, wandistiller, write_json
from recipes import recipe
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from wandistiller.adapters import extract
from wandistiller.original import FIXED, LARGEST, QUANTIZED, original_name, quantized, unlike_published

PUBLISHED = """
blocks.0.cross_attn.k.bias blocks.0.cross_attn.k.weight blocks.0.cross_attn.norm_k.weight blocks.0.cross_attn.norm_q.weight
blocks.0.cross_attn.o.bias blocks.0.cross_attn.o.weight blocks.0.cross_attn.q.bias blocks.0.cross_attn.q.weight
blocks.0.cross_attn.v.bias blocks.0.cross_attn.v.weight blocks.0.ffn.0.bias blocks.0.ffn.0.weight blocks.0.ffn.2.bias
blocks.0.ffn.2.weight blocks.0.modulation blocks.0.norm3.bias blocks.0.norm3.weight blocks.0.self_attn.k.bias
blocks.0.self_attn.k.weight blocks.0.self_attn.norm_k.weight blocks.0.self_attn.norm_q.weight blocks.0.self_attn.o.bias
blocks.0.self_attn.o.weight blocks.0.self_attn.q.bias blocks.0.self_attn.q.weight blocks.0.self_attn.v.bias
blocks.0.self_attn.v.weight head.head.bias head.head.weight head.modulation patch_embedding.bias patch_embedding.weight
text_embedding.0.bias text_embedding.0.weight text_embedding.2.bias text_embedding.2.weight time_embedding.0.bias
time_embedding.0.weight time_embedding.2.bias time_embedding.2.weight time_projection.1.bias time_projection.1.weight
""".split()
"""The names in Wan-AI/Wan2.1-T2V-1.3B's diffusion_pytorch_model.safetensors, of one block."""
INPUTS = (2, 16, 1, 4, 4), (2, 9, 32)


def trained(folder: Path, wan: Path, **more: Any) -> Path:
    given = recipe(folder, wan, output_dir=str(folder / "run"), max_steps=3, **more)
    wandistiller("train", "--recipe", write_json(folder / "recipe.json", given), ranks=2)
    return folder / "run"


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Path:
    """A student of its teacher's shape, of which only matrices were trained."""
    frozen = ["bias", "norm2", "norm_q", "norm_k", "scale_shift_table", "patch_embedding"]
    return trained(tmp_path_factory.mktemp("two"), wan2, student_config={"experts": "two"}, frozen=frozen, shift=4.0)


def answer(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, text = (torch.randn(size, generator=generator) for size in INPUTS)
    with torch.no_grad():
        return model(x, torch.tensor([900.0, 300.0]), text).sample


def test_names_of_a_network_are_those_of_the_published_file(wan1: Path) -> None:
    names = {original_name(name) for name in WanTransformer3DModel.from_pretrained(wan1, subfolder="transformer").state_dict()}
    assert {name for name in names if not name.startswith("blocks.") or name.startswith("blocks.0.")} == set(PUBLISHED)


@pytest.mark.parametrize(("side", "name"), [("_high_noise", "transformer"), ("_low_noise", "transformer_2")])
def test_a_single_file_opens_as_the_same_network(two_experts: Path, tmp_path: Path, side: str, name: str) -> None:
    wandistiller("export", "--checkpoint", two_experts, "--output", tmp_path / "w.safetensors", "--format", "original",
                 "--dtype", "float32")  # fmt: skip
    wandistiller("export", "--checkpoint", two_experts, "--output", tmp_path / "folder", "--dtype", "float32")
    wanted = WanTransformer3DModel.from_pretrained(tmp_path / "folder", subfolder=name)
    found = WanTransformer3DModel.from_single_file(str(tmp_path / f"w{side}.safetensors"), config=str(tmp_path / "w.card"))
    assert all(torch.equal(value, wanted.state_dict()[key]) for key, value in found.state_dict().items())
    assert torch.equal(answer(found), answer(wanted))


def test_a_file_says_what_loaders_and_people_look_for(two_experts: Path, tmp_path: Path) -> None:
    wandistiller("export", "--checkpoint", two_experts, "--output", tmp_path / "w.safetensors", "--format", "original")
    with safe_open(tmp_path / "w_high_noise.safetensors", "pt") as file:
        about = file.metadata()
    assert about["format"] == "pt" and about["modelspec.architecture"] == "Wan" and "shift 4.0" in about["modelspec.description"]
    assert json.loads(about["wandistiller"])["shift"] == 4.0


def test_eight_bit_weights_are_the_nearest_that_their_scale_allows(two_experts: Path, tmp_path: Path) -> None:
    for dtype in ("float8_e4m3fn", "bfloat16"):
        wandistiller("export", "--checkpoint", two_experts, "--output", tmp_path / f"{dtype}.safetensors", "--format", "original",
                     "--dtype", dtype)  # fmt: skip
    small, plain = (load_file(tmp_path / f"{d}_high_noise.safetensors") for d in ("float8_e4m3fn", "bfloat16"))
    matrices = [name for name in plain if QUANTIZED.match(name)]
    assert len(matrices) == 10 * 4
    for name in matrices:
        stored, scale, weight = small[name], small[name + "_scale"], plain[name].float()
        assert stored.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == ()
        step = torch.maximum(weight.abs() * 2**-4, scale * 2**-10)  # half of the distance to the next number, 3 bits of mantissa
        assert ((stored.float() * scale - weight).abs() <= step * 1.001).all()
        mark = bytes(small[name.replace("weight", "comfy_quant")].tolist())
        assert json.loads(mark) == {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    assert all(torch.equal(small[name], plain[name]) for name in plain if name not in matrices)


def test_a_matrix_of_zeros_has_a_scale() -> None:
    found = dict(quantized("blocks.0.ffn.0.weight", torch.zeros(2, 2)))
    assert found["blocks.0.ffn.0.weight"].float().eq(0).all() and 0 < found["blocks.0.ffn.0.weight_scale"] < 1 / LARGEST


def test_what_comfyui_cannot_open_is_said() -> None:
    assert unlike_published(FIXED) == []
    said = unlike_published(FIXED | {"attention_head_dim": 12})[0]
    assert said.startswith("`attention_head_dim` is 12; ComfyUI reads every Wan with 128")


def with_lora(wan: Path, *files: Path) -> dict[str, Tensor]:
    """What both experts of a pipeline answer with LoRA files: (of the first, of the second)."""
    pipe = WanPipeline.from_pretrained(wan)
    for second, file in enumerate(files):
        pipe.load_lora_weights(file.parent, weight_name=file.name, load_into_transformer_2=bool(second))
    return {name: answer(getattr(pipe, name)) for name in ("transformer", "transformer_2")}


def both(folder: Path) -> list[Path]:
    return [folder / "pytorch_lora_weights.safetensors", folder / "pytorch_lora_weights_2.safetensors"]


@pytest.mark.parametrize("style", ["diffusers", "original"])
def test_a_lora_cut_out_of_all_the_difference_makes_the_teacher_the_student(
    two_experts: Path, wan2: Path, tmp_path: Path, style: str
) -> None:
    target = tmp_path / ("lora" if style == "diffusers" else "lora.safetensors")
    flags = ["--adapter", "--format", style, "--energy", "1", "--rank", "10000", "--dtype", "float32"]
    wandistiller("export", "--checkpoint", two_experts, "--output", target, *flags)
    wandistiller("export", "--checkpoint", two_experts, "--output", tmp_path / "folder", "--dtype", "float32")
    files = both(target) if style == "diffusers" else [tmp_path / f"lora_{side}_noise.safetensors" for side in ("high", "low")]
    if style == "original":
        with safe_open(files[0], "pt") as file:
            assert file.metadata()["modelspec.architecture"] == "Wan/lora"
    assert "base_model_relation" not in (target.with_suffix(".card" * (style == "original")) / "README.md").read_text()
    found, before = with_lora(wan2, *files), with_lora(wan2)
    for name, value in found.items():
        wanted = answer(WanTransformer3DModel.from_pretrained(tmp_path / "folder", subfolder=name))
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
        assert (value - before[name]).abs().max() > 1e-3


def test_a_trained_lora_is_the_same_in_both_styles(tmp_path: Path, wan2: Path) -> None:
    lora = {"rank": 3, "alpha": 6, "targets": ["attn1", "ffn"]}
    output = trained(tmp_path, wan2, student_config={"experts": "two"}, lora=lora)
    for style, name in (("diffusers", "lora"), ("original", "lora.safetensors")):
        wandistiller("export", "--checkpoint", output, "--output", tmp_path / name, "--adapter", "--format", style,
                     "--dtype", "float32")  # fmt: skip
    here, there = (with_lora(wan2, *files) for files in (
        both(tmp_path / "lora"), [tmp_path / f"lora_{side}_noise.safetensors" for side in ("high", "low")]))  # fmt: skip
    for name, value in here.items():
        torch.testing.assert_close(value, there[name], rtol=0, atol=1e-6 * value.abs().max().item())


class Two(nn.Module):
    def __init__(self, first: Tensor, second: Tensor):
        super().__init__()
        self.first, self.second = (nn.Linear(*w.shape[::-1], bias=True) for w in (first, second))
        with torch.no_grad():
            for layer, weight in ((self.first, first), (self.second, second)):
                layer.weight.copy_(weight)
                layer.bias.zero_()


def test_the_rank_is_the_least_that_keeps_the_energy() -> None:
    """Singular values 4, 3 and 2, 1: squares 16 + 4, then 9 + 1, of 30 in all."""
    model = Two(torch.diag(torch.tensor([4.0, 3.0])), torch.diag(torch.tensor([1.0, 2.0])))
    with torch.no_grad():
        found = {energy: extract(model, lambda _, out: out.zero_(), energy, most=8) for energy in (0.5, 0.6, 0.7, 1.0)}
    assert {energy: f.adapter.rank for energy, f in found.items()} == {0.5: 1, 0.6: 1, 0.7: 2, 1.0: 2}
    assert found[0.5].kept == pytest.approx(20 / 30) and found[1.0].kept == 1.0 and found[1.0].beside == 0.0
    whole = found[1.0].adapter.state
    assert torch.allclose(whole["first.lora_B.weight"] @ whole["first.lora_A.weight"], model.first.weight)


def test_what_is_in_no_linear_layer_is_told() -> None:
    model = Two(torch.diag(torch.tensor([3.0, 0.0])), torch.zeros(2, 2))
    with torch.no_grad():
        model.first.bias.copy_(torch.tensor([1.0, 0.0]))
        assert extract(model, lambda _, out: out.zero_(), 1.0, most=2).beside == pytest.approx(0.1)


def test_a_student_of_another_shape_is_no_lora(tmp_path: Path, wan1: Path) -> None:
    output = trained(tmp_path, wan1)
    done = wandistiller("export", "--checkpoint", output, "--output", tmp_path / "l", "--adapter", code=2)
    assert "its student differs from" in done.stderr and "`num_layers`" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "w.safetensors").write_text("another's")
    done = wandistiller("export", "--checkpoint", output, "--output", tmp_path / "w.safetensors", "--format", "original", code=2)
    assert "is there, and no earlier export" in done.stderr
    wrong = ["--dtype", "float8_e4m3fn", "--energy", "0", "--rank", "0", "--max_shard_size", "much"]
    done = wandistiller("export", "--checkpoint", output, "--output", tmp_path / "x", *wrong, code=2)
    assert done.stderr.count("error: ") == 4


OFFLINE = """
import sys, torch
from diffusers import WanPipeline
pipe = WanPipeline.from_pretrained(sys.argv[1], torch_dtype=torch.float32)
pipe.scheduler.set_timesteps(4)
print([round(s, 6) for s in pipe.scheduler.sigmas.tolist()])
"""


def test_the_exported_folder_opens_offline_in_shards_and_walks_the_sigmas_trained_for(two_experts: Path, tmp_path: Path) -> None:
    target = tmp_path / "student"
    wandistiller("export", "--checkpoint", two_experts, "--output", target, "--max_shard_size", "300KB")
    assert len(list((target / "transformer").glob("*.safetensors"))) > 1
    done = run([sys.executable, "-c", OFFLINE, str(target)], cwd=tmp_path, HF_HUB_OFFLINE="1")
    sigmas = json.loads(done.stdout)
    unshifted = [s / (4.0 - 3.0 * s) for s in sigmas]  # sigma = 4 u / (1 + 3 u), shift 4
    assert unshifted == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0], abs=2e-3)


def test_the_card_has_front_matter_recipe_picture_and_the_evaluation(two_experts: Path, tmp_path: Path) -> None:
    (two_experts / "evaluation.md").write_text("# title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nnotes")
    wandistiller("export", "--checkpoint", two_experts, "--output", tmp_path / "s")
    card = (tmp_path / "s" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert {"library_name: diffusers", "pipeline_tag: text-to-video", "- distillation"} <= set(front.splitlines())
    assert "| 1 | 2 |" in text and '"guidance_scale"' in text and "data_path" not in text and "notes" not in text
    assert (tmp_path / "s" / "samples.png").read_bytes() == max((two_experts / "samples").glob("*.png")).read_bytes()
