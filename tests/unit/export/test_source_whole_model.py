"""LoRA files of whole models that others made: the teacher plus changes of known rank, in every form."""

from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from small_wan import small_transformer
from torch import Tensor, nn

from wandistiller.cli.main import main
from wandistiller.evaluation.candidates import read_candidate
from wandistiller.experts import Expert
from wandistiller.export.formats.original import original_state
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.added_lora import added_changes

RANK = 3
MAPS = ("to_q", "to_k", "to_v", "to_out.0")
FORMS = ["pipeline", "shards", "original", "ComfyUI's"]


def whole_model(wan: Path, expert: str = "transformer") -> tuple[WanTransformer3DModel, dict[str, Tensor]]:
    """The teacher plus b a of rank 3 in the maps of all attentions, and these changes."""
    model, changes = WanTransformer3DModel.from_pretrained(wan, subfolder=expert), {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(MAPS):
                a = keyed_normal((RANK, module.in_features), expert, name, "a")
                changes[name] = 0.01 * keyed_normal((module.out_features, RANK), expert, name, "b") @ a
                module.weight += changes[name]
    return model, changes


def stored(model: WanTransformer3DModel, folder: Path, form: str = "original") -> Path:
    """Write it; return what a user writes."""
    if form in ("pipeline", "shards"):
        inside = folder / "transformer" if form == "pipeline" else folder
        model.save_pretrained(inside, max_shard_size="100KB" if form == "shards" else "1GB")
        return folder
    prefix = "model.diffusion_model." if form == "ComfyUI's" else ""
    folder.mkdir()
    weights = original_state(model.state_dict(), False)
    save_file({prefix + name: t for name, t in weights.items()}, folder / "few_steps.safetensors")
    return folder / "few_steps.safetensors"


def made(wan: Path, place: object, output: Path, *flags: str, code: int = 0) -> Path:
    words = ["--teacher_path", str(wan), "--output", str(output), "--dtype", "float32", *flags]
    assert main(["export", "--adapter", "--checkpoint", str(place), *words]) == code
    return output


def changes_in(wan: Path, lora: Path, expert: Expert = Expert.HIGH_NOISE) -> dict[str, Tensor]:
    """What `--lora` of it changes."""
    folder = read_candidate(str(wan), [str(lora)]).folder
    found = added_changes(folder.added, folder.config, expert)
    return {layer: b @ a for layer, (a, b) in found.items() if (b @ a).abs().max() > 1e-4}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("output", ["lora", "lora.safetensors"])
def test_the_lora_of_a_whole_model_is_its_difference_to_the_teacher(
    output: str, form: str, wan1: Path, tmp_path: Path
) -> None:
    model, changes = whole_model(wan1)
    flags = ["--format", "original"] if output.endswith("s") else []
    lora = made(wan1, stored(model, tmp_path / "full", form), tmp_path / output, "--energy", "1", *flags)
    torch.testing.assert_close(changes_in(wan1, lora), changes, rtol=1e-4, atol=1e-5)


def test_at_less_rank_and_with_targets_it_has_the_largest_directions_of_these(
    wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of diag(4, 3, 0, ...) rank 1 keeps 16 / 25; another layer differs by 5, and a bias too."""
    full = WanTransformer3DModel.from_pretrained(wan1 / "transformer")
    with torch.no_grad():
        full.blocks[1].attn1.to_q.weight[0, 0] += 4
        full.blocks[1].attn1.to_q.weight[1, 1] += 3
        full.blocks[0].ffn.net[2].weight[2, 1] += 5
        full.blocks[0].attn1.to_q.bias[7] += 5
    place, wanted = stored(full, tmp_path / "full"), torch.zeros(64, 64)
    lora = made(wan1, place, tmp_path / "lora", "--rank", "1", "--targets", *MAPS[:3])
    wanted[0, 0] = 4
    torch.testing.assert_close(changes_in(wan1, lora), {"blocks.1.attn1.to_q": wanted}, rtol=1e-5, atol=1e-4)
    assert (
        "rank 1 keeps 64.00% of the squared difference of its layers; 66.67% of all"
        in capsys.readouterr().err
    )


def test_of_two_experts_each_network_of_a_pipeline_becomes_its_own_lora(wan2: Path, tmp_path: Path) -> None:
    wanted = {}
    for expert in Expert:
        model, wanted[expert] = whole_model(wan2, expert.value)
        model.save_pretrained(tmp_path / "full" / expert.value)
    lora = made(wan2, tmp_path / "full", tmp_path / "lora", "--energy", "1")
    for expert in Expert:
        torch.testing.assert_close(changes_in(wan2, lora, expert), wanted[expert], rtol=1e-4, atol=1e-5)


def test_one_network_of_two_experts_is_asked_for_its_expert(
    wan2: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, changes = whole_model(wan2, "transformer_2")
    place = stored(model, tmp_path / "full")
    made(wan2, place, tmp_path / "lora", code=2)
    assert f"Write high_noise={place}, low_noise={place}, or both=" in capsys.readouterr().err
    comfy = made(
        wan2, f"low_noise={place}", tmp_path / "lora.safetensors", "--format", "original", "--energy", "1"
    )
    lora = comfy.with_name("lora_low_noise.safetensors")
    torch.testing.assert_close(changes_in(wan2, lora, Expert.LOW_NOISE), changes, rtol=1e-4, atol=1e-5)
    assert changes_in(wan2, lora) == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ffn_dim": 64}, "its `blocks.0.ffn.0.weight` is not as the teacher's"),
        ({"layers": 3}, "its `blocks.3."),
        ({"layers": 5}, "its `blocks.4."),
        ({}, "it is in 8 bits. Give a model of the architecture of"),
    ],
)
def test_a_model_of_another_architecture_or_in_8_bits_is_refused(
    change: dict[str, int], text: str, wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = stored(small_transformer(0, **change) if change else whole_model(wan1)[0], tmp_path / "full")
    if not change:
        state = original_state(whole_model(wan1)[0].state_dict(), False)
        save_file({name: t.to(torch.float8_e4m3fn) for name, t in state.items()}, place)
    made(wan1, place, tmp_path / "lora", code=2)
    assert text in capsys.readouterr().err and not (tmp_path / "lora").exists()


def test_a_damaged_model_is_an_error_that_names_its_weight(
    wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, _ = whole_model(wan1)
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight[0, 0] = torch.nan
    made(wan1, stored(model, tmp_path / "full", "pipeline"), tmp_path / "lora", code=2)
    assert "`blocks.0.attn1.to_q.weight` holds numbers that are not finite" in capsys.readouterr().err


def test_without_a_teacher_a_whole_model_is_asked_for_one(
    wan1: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = stored(whole_model(wan1)[0], tmp_path / "full")
    words = ["--checkpoint", str(place), "--output", str(tmp_path / "lora")]
    assert main(["export", "--adapter", *words]) == 2
    assert "is a whole model. Say with --teacher_path which pipeline" in capsys.readouterr().err
