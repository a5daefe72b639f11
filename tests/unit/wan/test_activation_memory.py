"""Planned activations against what autograd saves, and against the peak of the CPU's allocator."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import deepspeed
import pytest
import torch
from small_wan import small_transformer
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from wandistiller.batch import Prediction
from wandistiller.engine.activation_checkpointing import empties_inputs, read_recompute
from wandistiller.engine.ds_schema import without_block
from wandistiller.objectives.feature import FeatureMatching
from wandistiller.student.blocks import Blocks, add_projections
from wandistiller.wan import activation_memory, text_padding
from wandistiller.wan.activation_memory import activation_bytes, call_bytes, compared_bytes
from wandistiller.wan.transformer import fresh_rope, velocity

SIZES = {"num_attention_heads": 4, "attention_head_dim": 64, "ffn_dim": 1024}
SIDE, TEXT = 48, 64  # latent pixels, text tokens
TOKENS, LATENT = (SIDE // 2) ** 2, (16, 1, SIDE, SIDE)
MICRO = 2


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer text tokens than Wan's 512, so that they weigh what they weigh beside a video's tokens."""
    for module in (activation_memory, text_padding):
        monkeypatch.setattr(module, "TEXT_TOKENS", TEXT)


def student_json(dtype: str, **block: Any) -> dict[str, Any]:
    ds: dict[str, Any] = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": {"stage": 2}}
    ds |= {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    return ds | (
        {"activation_checkpointing": {"partition_activations": False}, "wandistiller": block} if block else {}
    )


def network(layers: int, ds: dict[str, Any], dtype: str, matched_width: int | None = None) -> tuple[Any, Any]:
    """A network of `layers` with gradients, and its blocks; all matched with a teacher of `matched_width`."""
    model = small_transformer(0, layers, **SIZES)
    if matched_width:
        add_projections(model, range(layers), matched_width)
    model = model.to(getattr(torch, dtype))
    model.rope = fresh_rope(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    if "wandistiller" in ds:
        deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=without_block(ds))
    return model, Blocks(model, read_recompute(ds), copies=empties_inputs(ds))


def predict(model: torch.nn.Module, samples: int = MICRO) -> torch.Tensor:
    x_t_BCFHW, text_BLD = torch.randn(samples, *LATENT), torch.randn(samples, TEXT, 32)
    return velocity(model, x_t_BCFHW, torch.ones(samples), text_BLD)


def saved_by_autograd(layers: int, dtype: str) -> int:
    """Bytes behind the tensors that a forward pass saves for backward, weights left out."""
    model, _ = network(layers, student_json(dtype), dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # the tensors too, so that no address is used twice

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[t.untyped_storage().data_ptr()] = t
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        predict(model)
    return sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in weights)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at once on the CPU while `run` runs."""
    run()  # what is allocated once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def config(layers: int) -> dict[str, Any]:
    return dict(small_transformer(0, 1, **SIZES).config) | {"num_layers": layers}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [1, 4])
def test_planned_activations_are_what_autograd_saves(layers: int, dtype: str) -> None:
    planned = activation_bytes(config(layers), student_json(dtype), LATENT, MICRO, accelerator=False)
    assert planned == pytest.approx(saved_by_autograd(layers, dtype), rel=0.03)


PARTS = ("blocks", "attention", "feed_forward")
KINDS = [{}, *({"checkpoint": part} for part in PARTS), {"checkpoint_every": 2}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", KINDS, ids=str)
def test_planned_activations_are_the_measured_peak_of_forward_and_backward(
    one_rank: torch.device, block: dict[str, Any], dtype: str
) -> None:
    ds, layers = student_json(dtype, **block), 6
    model, _ = network(layers, ds, dtype)
    planned = activation_bytes(config(layers), ds, LATENT, MICRO, accelerator=False)
    measured = peak_bytes(lambda: predict(model).square().mean().backward())
    assert planned == pytest.approx(measured, rel=0.15)


def test_checkpoints_keep_the_inputs_of_all_blocks_once(one_rank: torch.device) -> None:
    """Text states (L = 64) and the six modulations of each block, float32, of width 256."""
    ds, layers = student_json("float32", checkpoint="blocks"), 6
    (model, _), (copying, _) = network(layers, ds, "float32"), network(layers, ds, "float32")
    Blocks(copying, read_recompute(ds), copies=True)
    kept, copied = (peak_bytes(lambda m=m: predict(m).square().mean().backward()) for m in (model, copying))
    assert copied - kept >= (layers - 1) * MICRO * (TEXT + 6) * 256 * 4


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_memory_of_a_call_without_gradients_is_the_measured_peak(dtype: str, samples: int) -> None:
    model, _ = network(3, student_json(dtype), dtype)
    with torch.no_grad():
        measured = peak_bytes(lambda: predict(model, samples))
    ds = {"bf16": {"enabled": dtype == "bfloat16"}}
    planned = call_bytes(config(3), ds, LATENT, samples, accelerator=False)
    in_float32_first = dtype == "bfloat16" and not torch.cpu.get_capabilities().get("avx512_bf16")
    assert planned == pytest.approx(measured, rel=0.35 if in_float32_first else 0.15)


def test_norms_of_one_kernel_on_a_gpu_save_less_than_those_of_the_cpu() -> None:
    cpu, gpu = (
        activation_bytes(config(1), student_json("bfloat16"), LATENT, 1, accelerator=a) for a in (False, True)
    )
    assert cpu - gpu == pytest.approx((8 - 2) * 256 * (3 * TOKENS + TEXT), rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("teacher_width", [256, 512])
def test_planned_memory_of_compared_hidden_states_is_the_measured_peak(
    one_rank: torch.device, teacher_width: int, dtype: str
) -> None:
    ds, layers, kind = student_json(dtype, checkpoint="blocks"), 6, getattr(torch, dtype)
    model, blocks = network(layers, ds, dtype, teacher_width)
    term = FeatureMatching().for_student(list(range(layers)))

    def run() -> None:
        targets = {k: torch.ones(MICRO, TOKENS, teacher_width, dtype=kind) for k in range(layers)}
        v_BCFHW = predict(model)
        features, blocks.features = blocks.features, {}
        loss_B = term.loss(Prediction(v_BCFHW, features), Prediction(v_BCFHW, targets), None)
        (v_BCFHW.square().mean() + loss_B.mean()).backward()

    planned = activation_bytes(config(layers), ds, LATENT, MICRO, accelerator=False)
    items = (kind.itemsize, kind.itemsize)
    planned += compared_bytes(layers, (TOKENS, TOKENS), MICRO, MICRO, (teacher_width, 256), items, ds)
    assert planned == pytest.approx(peak_bytes(run), rel=0.15)
