"""LoRA files that are added to a teacher as its weights are read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import recipe
from safetensors.torch import save_file
from styles import style, with_style
from torch import Tensor
from trainers import job_of

from wandistiller.experts import Expert
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.added_lora import read_added
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan

LAYER = "blocks.0.attn1.to_q"


def added(wan: Path, *given: Any) -> WanFolder:
    return open_wan(str(wan)).with_loras(read_added("recipe", "teacher_lora", list(given)))


def weight(
    folder: WanFolder, expert: Expert, layer: str = LAYER, dtype: torch.dtype = torch.float32
) -> Tensor:
    reader = folder.reader(expert)
    value = torch.empty(reader.stored[f"{layer}.weight"].shape, dtype=dtype)
    reader.read(f"{layer}.weight", value)
    assert reader.faults == []
    return value


def test_a_weight_is_read_with_the_sum_of_all_changes_and_others_as_they_are(
    wan1: Path, tmp_path: Path
) -> None:
    one, two = (style(wan1, tmp_path / f"{n}.safetensors", "to_q", "ffn", seed=n) for n in (1, 2))
    wanted = open_wan(
        str(with_style(wan1, tmp_path / "on_disk", (one, 0.5), (two, -2.0), experts=("transformer",)))
    )
    strengths = {"file": str(one), "strength": 0.5}, {"file": str(two), "strength": -2.0}
    found = added(wan1, *strengths)
    for layer in (LAYER, "blocks.1.ffn.net.0.proj", "blocks.0.attn2.to_k"):
        pair = (weight(folder, Expert.HIGH_NOISE, layer) for folder in (found, wanted))
        torch.testing.assert_close(*pair, rtol=0, atol=1e-6)


def test_any_part_of_a_weight_is_the_same_part_of_the_whole_bitwise(wan1: Path, tmp_path: Path) -> None:
    folder = added(wan1, str(style(wan1, tmp_path / "style.safetensors", "to_q")))
    whole_N = weight(folder, Expert.HIGH_NOISE, dtype=torch.bfloat16).flatten()
    part_N = torch.full((1000,), 7.0, dtype=torch.bfloat16)
    first = len(whole_N) - 700
    folder.reader(Expert.HIGH_NOISE).read(f"{LAYER}.weight", part_N, first)
    assert torch.equal(part_N[:700], whole_N[first:]) and part_N[700:].eq(7).all()


def test_a_file_for_one_expert_leaves_the_other_as_it_is(wan2: Path, tmp_path: Path) -> None:
    file, plain = str(style(wan2, tmp_path / "style.safetensors", "to_q")), open_wan(str(wan2))
    folder = added(wan2, {"file": file, "expert": "low_noise"})
    assert torch.equal(weight(folder, Expert.HIGH_NOISE), weight(plain, Expert.HIGH_NOISE))
    assert not torch.equal(weight(folder, Expert.LOW_NOISE), weight(plain, Expert.LOW_NOISE))


def test_the_ways_to_write_an_expert_mean_the_same(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    low, both = (str(style(wan2, tmp_path / "lr=1" / f"{n}.safetensors", "to_q", seed=n)) for n in (1, 2))
    older = added(wan2, {"file": low, "expert": "low_noise"}, both)
    for given in (
        [{"file": low, "expert": "low_noise"}, {"file": both, "expert": "both"}],
        [f"low_noise={low}", f"both={both}"],
        {"low_noise": low, "both": both},
    ):
        job = job_of(recipe(tmp_path, wan2, output_dir=str(tmp_path / "run"), teacher_lora=given))
        assert job.folder.identity == older.identity
        again = recipe(tmp_path, wan2, output_dir=str(tmp_path / "run"), teacher_lora=job.run.teacher_lora)
        assert job_of(again).folder.identity == older.identity


def test_the_identity_is_that_of_the_content_and_of_how_it_is_added(wan1: Path, tmp_path: Path) -> None:
    first, other = (style(wan1, tmp_path / f"{n}.safetensors", "to_q", seed=n) for n in (1, 2))
    moved = first.rename(tmp_path / "moved.safetensors")
    same = style(wan1, tmp_path / "1.safetensors", "to_q", seed=1)
    names = [str(same), str(moved), str(other), {"file": str(same), "strength": 0.9}]
    identities = [added(wan1, name).identity for name in names] + [open_wan(str(wan1)).identity]
    assert identities[0] == identities[1] and len(set(identities)) == 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"file": "x", "strenght": 1.0},
            "`teacher_lora.0.strenght` is 1.0. Unknown key. Did you mean `strength`?",
        ),
        (
            {"file": "STYLE", "expert": "low_noise"},
            "is for the low-noise expert, which is not here. Leave it out, or",
        ),
        ({"file": "WIDER"}, "its change of `blocks.0.attn1.to_q` is of shape [72, 64], and that is [64, 64]"),
    ],
)
def test_what_cannot_be_added_is_refused_with_its_reason(
    wan1: Path, tmp_path: Path, given: dict[str, Any], text: str
) -> None:
    files = {
        "STYLE": style(wan1, tmp_path / "style.safetensors", "to_q"),
        "WIDER": tmp_path / "wider.safetensors",
    }
    outputs, inputs = open_wan(str(wan1)).config.shapes[f"{LAYER}.weight"]
    down, up = torch.zeros(2, inputs), torch.zeros(outputs + 8, 2)
    save_file({f"{LAYER}.lora_A.weight": down, f"{LAYER}.lora_B.weight": up}, files["WIDER"])
    with pytest.raises(ConfigError) as raised:
        added(wan1, given | {"file": str(files.get(given["file"], given["file"]))})
    assert text in str(raised.value)
