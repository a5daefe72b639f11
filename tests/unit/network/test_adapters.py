"""Adapters: ranks by part, and a start from a LoRA that others made."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from reading import run_of
from recipes import recipe, train
from small_wan import small_transformer
from states import state
from styles import style
from torch import Tensor
from trainers import job_of

from wandistiller.cli.main import main
from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.network.adapters import Lora, add_lora, begin_with
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.lora_files import read_lora
from wandistiller.wan.transformer import velocity


def ranks(lora: Lora) -> dict[str, int]:
    model = small_transformer(0, 2)
    add_lora(model, lora, seed=0)
    return {name: m.r["default"] for name, m in model.named_modules() if hasattr(m, "lora_A")}


def test_the_last_part_that_names_a_layer_gives_its_rank() -> None:
    lora = Lora(rank=4, targets=["to_q", "ffn"], ranks={"ffn": 8, "blocks.1.ffn.net.2": 2})
    assert ranks(lora) == {
        "blocks.0.attn1.to_q": 4,
        "blocks.0.attn2.to_q": 4,
        "blocks.0.ffn.net.0.proj": 8,
        "blocks.0.ffn.net.2": 8,
        "blocks.1.attn1.to_q": 4,
        "blocks.1.attn2.to_q": 4,
        "blocks.1.ffn.net.0.proj": 8,
        "blocks.1.ffn.net.2": 2,
    }


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_without_alpha_the_factor_of_every_layer_is_1(alpha: float | None) -> None:
    model = small_transformer(0, 1)
    add_lora(model, Lora(rank=4, alpha=alpha, targets=["to_q", "ffn"], ranks={"ffn": 8}), seed=0)
    factors = {m.r["default"]: m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert factors == ({4: 1.0, 8: 1.0} if alpha is None else {4: 1.5, 8: 0.75})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_whose_factor_is_1_has_the_bits_of_peft_s(dtype: torch.dtype) -> None:
    model = small_transformer(0, 1)
    add_lora(model, Lora(rank=4), seed=0)
    layer, found = model.blocks[0].attn1.to_q.to(dtype), []
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    for forward in (layer.forward, partial(type(layer).forward, layer)):
        x_BSD = keyed_normal((2, 5, 64), "x").to(dtype).requires_grad_()
        layer.zero_grad()
        (out_BSD := forward(x_BSD)).backward(keyed_normal((2, 5, 64), "slope").to(dtype))
        found.append([out_BSD, x_BSD.grad, *(p.grad for p in layer.parameters() if p.requires_grad)])
    assert "forward" in vars(layer) and all(map(torch.equal, *found))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> Path:
    """A LoRA of rank 3 for all attention."""
    return style(
        wan1, tmp_path_factory.mktemp("published") / "it.safetensors", "to_q", "to_k", "to_v", "to_out"
    )


def sampled(model: torch.nn.Module) -> Tensor:
    x, text = keyed_normal((2, 16, 1, 4, 4), "x"), keyed_normal((2, 9, 32), "text")
    with torch.no_grad():
        return velocity(model, state(x, torch.tensor([0.9, 0.3]), text))


def test_adapters_of_a_higher_rank_begin_as_the_file(published: Path, wan1: Path) -> None:
    model, teacher = (type(small_transformer(0)).from_pretrained(wan1 / "transformer") for _ in range(2))
    add_lora(model, Lora(rank=8, alpha=4), seed=0)
    before = sampled(model)
    begin_with(model, read_lora(published).layers)
    assert torch.equal(before, sampled(teacher))
    for layer, (a, b) in read_lora(published).layers.items():
        teacher.get_parameter(f"{layer}.weight").data += b @ a
    torch.testing.assert_close(sampled(model), sampled(teacher), rtol=1e-4, atol=1e-5)
    assert not torch.equal(sampled(model), before)


@pytest.mark.slow
def test_an_export_at_less_rank_has_the_largest_directions_of_a_run_s_adapters(
    wan1: Path, tmp_path: Path
) -> None:
    run = train(tmp_path, wan1, ranks=1, lora={"rank": 4, "alpha": 2}, **WHOLE)
    words = ["export", "--checkpoint", str(run), "--adapter", "--dtype", "float32"]
    for name, flags in (("whole", []), ("cut", ["--rank", "2", "--energy", "1"])):
        assert main([*words, "--output", str(tmp_path / name), *flags]) == 0
    whole, cut = (
        read_lora(tmp_path / name / "pytorch_lora_weights.safetensors").layers for name in ("whole", "cut")
    )
    assert whole.keys() == cut.keys() and {one.rank for one in cut.values()} == {2}
    for layer, (a, b) in whole.items():
        u, s, vh = torch.linalg.svd(b @ a)
        torch.testing.assert_close(cut[layer].b @ cut[layer].a, (u[:, :2] * s[:2]) @ vh[:2])


WHOLE = {"student_config": {}, "max_steps": 1}


@pytest.mark.parametrize(
    ("lora", "text"),
    [
        ({"rank": 2}, "its rank is 3. Write that as `lora.rank`, or as `lora.ranks` .*to_q"),
        ({"rank": 3, "targets": ["to_q"]}, "Add to `lora.targets`: attn1.to_k, attn1.to_out.0"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_before_weights_are_read(
    published: Path, wan1: Path, tmp_path: Path, lora: dict[str, Any], text: str
) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"), **WHOLE)
    with pytest.raises(ConfigError, match=text):
        read_job(RunConfig(**given, lora=lora | {"start": str(published)}), 1)


def test_adapters_alone_need_no_student_config_and_are_of_the_whole_teacher(
    wan2: Path, tmp_path: Path, one_rank: torch.device
) -> None:
    given = recipe(tmp_path, wan2)
    del given["student_config"]
    job = job_of(vars_of(run_of(given | {"output_dir": str(tmp_path / "run"), "lora": {}})))
    assert job.student.experts == "two" and job.student_transformer == job.folder.config
    assert job.run.lora == {"rank": 16} and len(job.networks.bases) == 2


def vars_of(run: RunConfig) -> dict[str, Any]:
    return {name: getattr(run, name) for name in run.__slots__}
