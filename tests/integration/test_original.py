"""Exports open elsewhere: original-Wan files, LoRA files of both styles, the card."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from ranks import wandistiller, write_json
from recipes import train
from safetensors import safe_open
from safetensors.torch import load_file
from slow_cases import slow_but
from small_wan import small_transformer
from torch import Tensor, nn

from wandistiller.cli.main import main
from wandistiller.export.formats.original import LARGEST, QUANTIZED, original_state, quantized
from wandistiller.export.low_rank import extract
from wandistiller.wan.original_names import FIXED, original_name, unlike_published
from wandistiller.wan.transformer_config import TransformerConfig

PUBLISHED = """
blocks.0.cross_attn.k.bias blocks.0.cross_attn.k.weight blocks.0.cross_attn.norm_k.weight
blocks.0.cross_attn.norm_q.weight blocks.0.cross_attn.o.bias blocks.0.cross_attn.o.weight
blocks.0.cross_attn.q.bias blocks.0.cross_attn.q.weight blocks.0.cross_attn.v.bias
blocks.0.cross_attn.v.weight blocks.0.ffn.0.bias blocks.0.ffn.0.weight blocks.0.ffn.2.bias
blocks.0.ffn.2.weight blocks.0.modulation blocks.0.norm3.bias blocks.0.norm3.weight blocks.0.self_attn.k.bias
blocks.0.self_attn.k.weight blocks.0.self_attn.norm_k.weight blocks.0.self_attn.norm_q.weight
blocks.0.self_attn.o.bias blocks.0.self_attn.o.weight blocks.0.self_attn.q.bias blocks.0.self_attn.q.weight
blocks.0.self_attn.v.bias blocks.0.self_attn.v.weight head.head.bias head.head.weight head.modulation
patch_embedding.bias patch_embedding.weight text_embedding.0.bias text_embedding.0.weight
text_embedding.2.bias text_embedding.2.weight time_embedding.0.bias time_embedding.0.weight
time_embedding.2.bias time_embedding.2.weight time_projection.1.bias time_projection.1.weight
""".split()
"""The names in Wan-AI/Wan2.1-T2V-1.3B's diffusion_pytorch_model.safetensors, of one block."""
INPUTS = (2, 16, 1, 4, 4), (2, 9, 32)


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory, wan2: Path) -> Path:
    """The run of a student of its teacher's shape, of which only matrices were trained."""
    frozen = ["bias", "norm2", "norm_q", "norm_k", "scale_shift_table", "patch_embedding"]
    more = {"student_config": {"experts": "two"}, "frozen": frozen, "shift": 4.0, "max_steps": 3}
    return train(tmp_path_factory.mktemp("two"), wan2, ranks=1, **more)


def export(checkpoint: Path, output: Path, flags: str = "") -> None:
    wandistiller("export", "--checkpoint", checkpoint, "--output", output, *flags.split())


def predict(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, text = (torch.randn(size, generator=generator) for size in INPUTS)
    with torch.no_grad():
        return model(x, torch.tensor([900.0, 300.0]), text).sample


def test_names_of_a_network_are_those_of_the_published_file(wan1: Path) -> None:
    state = WanTransformer3DModel.from_pretrained(wan1, subfolder="transformer").state_dict()
    names = {original_name(name) for name in state}
    assert {n for n in names if n.startswith("blocks.0.") or not n.startswith("blocks.")} == set(PUBLISHED)


@pytest.fixture(scope="module")
def as_folder(two_experts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That student as a diffusers pipeline in float32."""
    folder = tmp_path_factory.mktemp("folder") / "student"
    export(two_experts, folder, "--dtype float32")
    return folder


@pytest.mark.slow
def test_single_files_open_as_the_same_networks(two_experts: Path, as_folder: Path, tmp_path: Path) -> None:
    export(two_experts, tmp_path / "w.safetensors", "--format original --dtype float32")
    for side, name in (("high", "transformer"), ("low", "transformer_2")):
        file = tmp_path / f"w_{side}_noise.safetensors"
        wanted = WanTransformer3DModel.from_pretrained(as_folder, subfolder=name)
        found = WanTransformer3DModel.from_single_file(str(file), config=str(tmp_path / "w.card"))
        assert all(torch.equal(value, wanted.state_dict()[key]) for key, value in found.state_dict().items())
        assert torch.equal(predict(found), predict(wanted))
        with safe_open(file, "pt") as opened:
            about = opened.metadata()
        assert about["format"] == "pt" and about["modelspec.architecture"] == "Wan"
        assert "shift 4," in about["modelspec.description"]
        assert json.loads(about["wandistiller"])["shift"] == 4.0


@pytest.mark.slow
def test_eight_bit_weights_are_the_nearest_that_their_scale_allows(two_experts: Path, tmp_path: Path) -> None:
    dtypes = ("float8_e4m3fn", "bfloat16")
    for dtype in dtypes:
        export(two_experts, tmp_path / f"{dtype}.safetensors", f"--format original --dtype {dtype}")
    small, plain = (load_file(tmp_path / f"{dtype}_high_noise.safetensors") for dtype in dtypes)
    # the layout that ComfyUI 0.3.64 reads as it is and later ones translate
    marker = small.pop("scaled_fp8")
    assert marker.dtype == torch.float8_e4m3fn and marker.numel() == 2
    matrices = [name for name in plain if QUANTIZED.match(name)]
    assert len(matrices) == 10 * 4
    for name in matrices:
        stored, scale, weight = (
            small[name],
            small.pop(name.replace("weight", "scale_weight")),
            plain[name].float(),
        )
        assert stored.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32 and scale.shape == ()
        # half of the distance to the next number, 3 bits of mantissa
        step = torch.maximum(weight.abs() * 2**-4, scale * 2**-10)
        assert ((stored.float() * scale - weight).abs() <= step * 1.001).all()
    assert small.keys() == plain.keys()
    assert all(torch.equal(small[name], plain[name]) for name in plain if name not in matrices)


def test_a_matrix_of_zeros_has_a_scale() -> None:
    found = dict(quantized("blocks.0.ffn.0.weight", torch.zeros(2, 2)))
    assert found["blocks.0.ffn.0.weight"].float().eq(0).all()
    assert 0 < found["blocks.0.ffn.0.scale_weight"] < 1 / LARGEST


def test_the_layers_without_a_scale_are_the_six_that_the_text_calls_harmless() -> None:
    state = original_state(small_transformer(0).state_dict(), True)
    linear = {name for name, weight in state.items() if name.endswith(".weight") and weight.dim() == 2}
    without = {name for name in linear if name.replace(".weight", ".scale_weight") not in state}
    named = ("text_embedding", "time_embedding")
    six = {f"{name}.{n}.weight" for name in named for n in (0, 2)}
    assert without == six | {"time_projection.1.weight", "head.head.weight"}


def test_maps_of_the_states_of_given_frames_are_in_eight_bits_within_the_blocks_alone() -> None:
    model = small_transformer(0, 1, in_channels=36, image_dim=24, added_kv_proj_dim=64)
    state = original_state(model.state_dict(), True)
    stored = {name: value.dtype for name, value in state.items() if "img" in name and value.dim() == 2}
    small, whole = torch.float8_e4m3fn, torch.float32
    blocks = {f"blocks.0.cross_attn.{name}_img.weight": small for name in "kv"}
    assert stored == blocks | {f"img_emb.proj.{n}.weight": whole for n in (1, 3)}


def test_what_comfyui_cannot_open_is_reported() -> None:
    assert unlike_published(TransformerConfig.usual(**FIXED)) == []
    message = unlike_published(TransformerConfig.usual(**FIXED | {"attention_head_dim": 12}))[0]
    assert message.startswith("`attention_head_dim` is 12; ComfyUI reads every Wan with 128")


def with_lora(wan: Path, *files: Path) -> dict[str, Tensor]:
    """Outputs of a pipeline's experts with LoRA files, (one for the first, one for the second)."""
    pipe = WanPipeline.from_pretrained(wan)
    for second, file in enumerate(files):
        pipe.load_lora_weights(file.parent, weight_name=file.name, load_into_transformer_2=bool(second))
    return {name: predict(getattr(pipe, name)) for name in ("transformer", "transformer_2")}


def both(folder: Path) -> list[Path]:
    return [folder / "pytorch_lora_weights.safetensors", folder / "pytorch_lora_weights_2.safetensors"]


def comfy(folder: Path) -> list[Path]:
    return [folder / f"lora_{side}_noise.safetensors" for side in ("high", "low")]


@pytest.mark.parametrize("style", slow_but(["original"], ["diffusers", "original"]))
def test_a_lora_cut_out_of_all_the_difference_makes_the_teacher_the_student(
    two_experts: Path, as_folder: Path, wan2: Path, tmp_path: Path, style: str
) -> None:
    target = tmp_path / ("lora" if style == "diffusers" else "lora.safetensors")
    export(two_experts, target, f"--adapter --format {style} --energy 1 --rank 10000 --dtype float32")
    files = both(target) if style == "diffusers" else comfy(tmp_path)
    if style == "original":
        with safe_open(files[0], "pt") as file:
            assert file.metadata()["modelspec.architecture"] == "Wan/lora"
    card = target.with_suffix(".card") if style == "original" else target
    text = (card / "README.md").read_text()
    assert "base_model_relation" not in text and "not the 100" not in text
    found, before = with_lora(wan2, *files), with_lora(wan2)
    for name, value in found.items():
        wanted = predict(WanTransformer3DModel.from_pretrained(as_folder, subfolder=name))
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
        assert (value - before[name]).abs().max() > 1e-3


LAYERS = ["first", "second"]


class Two(nn.Module):
    def __init__(self, first: Tensor, second: Tensor):
        super().__init__()
        self.first, self.second = (nn.Linear(*w.shape[::-1], bias=True) for w in (first, second))
        with torch.no_grad():
            for layer, weight in ((self.first, first), (self.second, second)):
                layer.weight.copy_(weight)
                layer.bias.zero_()


def test_the_rank_is_the_least_that_keeps_the_energy_and_what_is_in_no_linear_layer_is_reported() -> None:
    """Singular values 4, 3 and 2, 1: squares 16 + 4, then 9 + 1, of 30 in all."""
    model = Two(torch.diag(torch.tensor([4.0, 3.0])), torch.diag(torch.tensor([1.0, 2.0])))
    energies = (0.5, 0.6, 0.7, 1.0)
    with torch.no_grad():
        found = {energy: extract(LAYERS, model.named_parameters(), energy, most=8) for energy in energies}
    assert {energy: f.adapter.rank for energy, f in found.items()} == {0.5: 1, 0.6: 1, 0.7: 2, 1.0: 2}
    assert found[0.5].share == pytest.approx(20 / 30) and found[1.0].share == 1.0
    assert found[1.0].outside == 0.0
    whole = found[1.0].adapter.state
    assert torch.allclose(whole["first.lora_B.weight"] @ whole["first.lora_A.weight"], model.first.weight)
    model = Two(torch.diag(torch.tensor([3.0, 0.0])), torch.zeros(2, 2))
    with torch.no_grad():
        model.first.bias.copy_(torch.tensor([1.0, 0.0]))
        assert extract(LAYERS, model.named_parameters(), 1.0, most=2).outside == pytest.approx(0.1)


@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize(
    ("flags", "message"),
    [("--adapter", "its student differs from"), ("--format original", "is there, and no earlier export")],
)
def test_an_export_that_cannot_be_is_refused(
    flags: str, message: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / ("w.safetensors" if "original" in flags else "w")
    if "original" in flags:
        output.write_text("another's")
    assert main(["export", "--checkpoint", str(finished), "--output", str(output), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1 and "Traceback" not in error


def test_the_exported_folder_opens_offline_in_shards_walks_the_sigmas_trained_for_and_has_a_card(
    two_experts: Path, tmp_path: Path
) -> None:
    (two_experts / "evaluation.md").write_text("# title\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nnotes")
    write_json(two_experts / "evaluation.json", {"trained_steps": 3})
    target = tmp_path / "student"
    export(two_experts, target, "--max_shard_size 300KB")
    assert len(list((target / "transformer").glob("*.safetensors"))) > 1
    scheduler = WanPipeline.from_pretrained(target, torch_dtype=torch.float32).scheduler
    scheduler.set_timesteps(4)
    unshifted = [s / (4.0 - 3.0 * s) for s in scheduler.sigmas.tolist()]  # sigma = 4 u / (1 + 3 u), shift 4
    assert unshifted == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0], abs=2e-3)
    _, front, text = (target / "README.md").read_text().split("---\n", 2)
    promised = {"library_name: diffusers", "pipeline_tag: text-to-video", "- distillation"}
    assert promised <= set(front.splitlines())
    assert "| 1 | 2 |" in text and '"guidance_scale"' in text
    assert "data_path" not in text and "notes" not in text
    picture = max((two_experts / "samples").glob("*.png"))
    assert (target / "samples.png").read_bytes() == picture.read_bytes()
