"""Teachers in 8 and 4 bits: torchao's own numbers in every placement, lean loading, and bytes."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from engines import batch_for
from ranks import call
from recipes import recipe
from shipped import placement
from slow_cases import slow_but
from small_wan import small_transformer
from tensors import count_no_shells
from torch import Tensor, nn

pytest.importorskip("torchao")

from on_ranks.quantized import FORMATS, PLACEMENTS, by_torchao, differences

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.engine.engine_config import EngineConfig
from wandistiller.network.activation_memory import Live
from wandistiller.network.block_source import BUFFERS
from wandistiller.network.weight_reader import CHUNK_BYTES, WeightReader
from wandistiller.planner.teacher_memory import teacher_bytes
from wandistiller.teacher import quantized
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.loading import load_whole
from wandistiller.teacher.quantized import (
    is_quantized,
    on_meta,
    stored_sizes,
    tensors_of,
    unpacked_bytes,
    unpacked_until_backward,
)
from wandistiller.utils.errors import ConfigError
from wandistiller.wan.folder import WanFolder
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer_config import TransformerConfig

DTYPES = (torch.float32, torch.bfloat16)


def tensors(parameter: Tensor) -> list[Tensor]:
    """The plain tensors of a parameter."""
    return tensors_of(parameter) if hasattr(parameter, "__tensor_flatten__") else [parameter]


def held(model: nn.Module) -> int:
    return sum(t.nbytes for p in model.parameters() for t in tensors(p))


# Formats


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (96, 64), (64, 96), (1536, 8960), (5120, 5120)])
def test_torchao_stores_a_weight_in_the_tensors_that_are_planned(
    weights: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    stored = tensors_of(on_meta(torch.Size(shape), dtype, weights))
    planned = stored_sizes(list(shape), weights, dtype.itemsize)
    assert [(t.numel(), t.element_size()) for t in stored] == planned


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_takes_no_more_memory_for_a_weight_than_planned(weights: str, dtype: torch.dtype) -> None:
    n, x_BD = 512 * 2048, torch.randn(3, 2048, dtype=dtype)
    weight = nn.Parameter(quantized.quantized(torch.randn(512, 2048, dtype=dtype), weights), False)
    with torch.no_grad(), Live() as live:
        live._known.update(t.untyped_storage() for t in tensors(weight))
        nn.functional.linear(x_BD, weight, torch.zeros(512, dtype=dtype))
    planned = unpacked_bytes(n, weights, dtype.itemsize)
    assert 0.95 * planned < live.most < 1.05 * planned


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_autograd_keeps_a_weight_unpacked_as_planned(weights: str, dtype: torch.dtype) -> None:
    n, x_BD = 512 * 2048, torch.randn(3, 2048, dtype=dtype, requires_grad=True)
    weight = nn.Parameter(quantized.quantized(torch.randn(512, 2048, dtype=dtype), weights), False)
    with Live() as live:
        live._known.update(t.untyped_storage() for t in tensors(weight))
        out_BD = nn.functional.linear(x_BD, weight)
        kept = live.now - out_BD.nbytes
        out_BD.sum().backward()
    planned = unpacked_until_backward(n, weights, dtype.itemsize)
    assert planned <= kept < planned + 0.05 * n
    assert live.most < 1.05 * max(planned, unpacked_bytes(n, weights, dtype.itemsize))


def test_all_linear_layers_of_blocks_are_quantised_and_nothing_else(wans: dict[str, WanFolder]) -> None:
    model = wans["1.3B"].config.replaced(num_layers=2).meta()
    linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    found = {name for name, p in model.named_parameters() if is_quantized(name, p.shape, "nf4")}
    assert found == {name for name in linear if name.startswith("blocks.")} and len(found) == 20


def test_a_layer_that_blocks_of_64_elements_do_not_fill_stays_as_it_is() -> None:
    assert [is_quantized("blocks.0.ffn.net.2.weight", [6, 10], w) for w in FORMATS] == [True, True, False]


# Loading


EACH_ONCE = [f"{n} {w} bfloat16" for n, w in zip(PLACEMENTS, (*FORMATS, "nf4"), strict=True)]
ONE_RANK = [f"{name} {weights} bfloat16" for name in PLACEMENTS for weights in FORMATS]
TWO_RANKS = [f"{name} nf4 float32" for name in PLACEMENTS] + [
    "streamed int8 bfloat16",
    "host_cpu float8 float32",
]


@pytest.mark.parametrize(
    ("ranks", "tasks"), slow_but([(1, EACH_ONCE)], [(1, EACH_ONCE), (1, ONE_RANK), (2, TWO_RANKS)])
)
def test_every_placement_s_guided_velocities_and_hidden_states_are_bitwise_torchao_s(
    ranks: int, tasks: list[str], wan2: Path
) -> None:
    found = call(differences, wan2, tasks, ranks=ranks)
    assert {task: [own[task]["difference"] for own in found] for task in tasks} == dict.fromkeys(
        tasks, [0] * ranks
    )


@pytest.mark.slow
def test_a_rank_reads_what_it_would_without_quantising(wide: Path) -> None:
    """An owner's other rank nothing; ranks that share a copy the halves of its blocks."""
    names = {"replicated": [1, 1], "owner": [1, 0], "host_cpu": [0.5, 0.5]}
    tasks = [f"{name} int8 float32" for name in (*names, "streamed")]
    found = call(differences, wide, tasks, ranks=2)
    files = [*wide.glob("transformer*/*.safetensors")]
    stored, slack = sum(file.stat().st_size for file in files), 10 * 2**20
    for task, shares in zip(tasks, names.values(), strict=False):
        assert [own[task]["read"] for own in found] == [pytest.approx(s * stored, abs=slack) for s in shares]
    first, second = (own[tasks[-1]] for own in found)
    assert stored / 2 < first["read"] < stored and first["shared"] == second["shared"] != []


@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("weights", FORMATS)
def test_the_planned_bytes_are_those_that_are_held(
    one_rank: torch.device, wan2: Path, weights: str, dtype: str
) -> None:
    folder = open_wan(str(wan2))
    for name in PLACEMENTS:
        placed = placement(name, dtype, weights=weights)
        built = build_teacher(folder, placed)
        experts = getattr(built, "inner", built) or built
        planned = teacher_bytes(folder, placed, 1)
        models = [network.module for network in experts.experts.values()]
        if name == "streamed":
            blocks, others = (
                sum(held(part) for m in models for k, part in m.named_children() if (k == "blocks") == inside)
                for inside in (True, False)
            )
            tables = sum(m.scale_shift_table.nbytes for m in models)
            assert planned.device - BUFFERS * planned.node // 8 == others + tables  # four blocks each
            assert blocks <= planned.node < 1.1 * blocks + 8 * 64 * 60  # pieces begin at multiples of 64
        else:
            assert planned.device + planned.node == sum(held(model) for model in models)


def test_a_rank_never_holds_much_more_than_the_quantised_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_transformer(0, 12, ffn_dim=512, num_attention_heads=4).save_pretrained(tmp_path)
    config = TransformerConfig.of(WanTransformer3DModel.load_config(tmp_path))
    reader = WeightReader(tmp_path)
    count_no_shells(monkeypatch)
    with Live() as live:
        model = load_whole(reader, config, torch.float32, torch.device("cpu"), "int8")
    largest = 4 * 512 * 128  # a feed-forward layer in float32
    slack = CHUNK_BYTES + 8 * largest
    assert (
        held(model) < live.most < held(model) + slack < sum(4 * p.numel() for p in model.parameters()) / 1.5
    )


# What they need


def test_missing_torchao_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    engine = EngineConfig("t.json", {})
    assert quantized.missing_problems(engine, "int8") == []
    for version, text in ((missing, "It needs torchao."), (lambda _: "0.17.0", "0.18, and here is 0.17.0.")):
        monkeypatch.setattr(quantized, "version", version)
        (found,) = quantized.missing_problems(engine, "int8")
        assert '`wandistiller.weights` is "int8"' in found and text in found
        assert found.endswith('Run: pip install "torchao==0.18.*"')
        assert quantized.missing_problems(engine, None) == []


def test_a_run_without_torchao_stops_before_any_weight_is_read(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "version", lambda _: "0.1.0")
    given = recipe(tmp_path, wan1, teacher_deepspeed_config={"wandistiller": {"weights": "nf4"}})
    with pytest.raises(ConfigError, match="needs torchao"):
        read_job(RunConfig(**given), 1)
    read_job(RunConfig(**given), 1, here=False)


# Compiled


@pytest.mark.slow  # minutes of compiling
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("weights", FORMATS)
def test_compiled_blocks_compute_what_they_compute_eagerly(weights: str, wan1: Path) -> None:
    folder, found = open_wan(str(wan1)), []
    batch = batch_for(by_torchao(wan1 / "transformer", torch.float32, None))
    for compiled in (False, True):
        placed = placement("streamed", "float32", weights=weights, compile=compiled)
        found.append([p.v_BCFHW for p in build_teacher(folder, placed).predict_all([batch, batch], ())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
