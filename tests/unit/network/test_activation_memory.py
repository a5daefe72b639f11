"""Planned activations against what autograd saves, and against the peak of the CPU's allocator."""

from itertools import product
from typing import Any

import pytest
import torch
from activations import (
    LATENT,
    MICRO,
    TEXT,
    TOKENS,
    config,
    network,
    peak_bytes,
    predict,
    shared_peaks,
    student_engine,
)
from ranks import call
from slow_cases import slow_but

from wandistiller.batch import Prediction
from wandistiller.distributed.sequence_parallel import ImaginedRanks
from wandistiller.engine.engine_config import EngineConfig, Kernels
from wandistiller.network.activation_memory import activation_bytes, call_bytes, compared_bytes
from wandistiller.network.blocks import Blocks
from wandistiller.objectives.feature import FeatureMatching
from wandistiller.wan import structure, text_padding
from wandistiller.wan.kernels import share_sequences, use_kernels
from wandistiller.wan.transformer_config import TransformerConfig


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer text tokens than Wan's 512, so that they weigh what they weigh beside a video's tokens."""
    monkeypatch.setattr(text_padding, "TEXT_TOKENS", TEXT)
    monkeypatch.setattr(TransformerConfig, "text_tokens", TEXT)


PARTS = ("blocks", "attention", "feed_forward")
KINDS = [{}, *({"checkpoint": part} for part in PARTS), {"checkpoint_every": 2}, {"checkpoint_but_last": 4}]
CASES = slow_but(
    [(KINDS[1], "float32", 1)],  # bf16 is emulated on many CPUs
    product(KINDS, ("float32", "bfloat16"), (1, 4)),
)


@pytest.mark.parametrize(("block", "dtype", "sharers"), CASES, ids=str)
def test_planned_activations_of_all_or_a_part_of_the_tokens_are_the_measured_peak(
    one_rank: torch.device, block: dict[str, Any], dtype: str, sharers: int
) -> None:
    engine, layers = student_engine(dtype, **block), 6
    model, _ = network(layers, engine)
    how = {"accelerator": False, "sharers": sharers}
    planned = activation_bytes(config(layers), engine, LATENT, MICRO, **how).transient
    if sharers > 1:
        share_sequences(model, ImaginedRanks(sharers))
        use_kernels(model, Kernels())
    measured = peak_bytes(lambda: predict(model).square().mean().backward())
    # oneDNN multiplies bf16 in float32 where the CPU cannot, and takes copies
    assert planned == pytest.approx(measured, rel=0.04 if dtype == "float32" else 0.12)


@pytest.mark.parametrize("blocks", slow_but([4], [0, 1, 4, 6]))
def test_planned_activations_of_adapters_are_the_measured_peak_whatever_blocks_are_kept(
    one_rank: torch.device, blocks: int
) -> None:
    engine, layers, lora = student_engine("float32", checkpoint_but_last=blocks), 6, {"rank": 4}
    model, _ = network(layers, engine, lora=lora)
    planned = activation_bytes(config(layers), engine, LATENT, MICRO, accelerator=False, lora=lora).transient
    measured = peak_bytes(lambda: predict(model).square().mean().backward())
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_checkpoints_keep_the_inputs_of_all_blocks_once(one_rank: torch.device) -> None:
    """Text states (L = 64) and the six modulations of each block, float32, of width 256."""
    engine, layers = student_engine("float32", checkpoint="blocks"), 6
    (model, _), (copying, _) = network(layers, engine), network(layers, engine)
    Blocks(copying, structure.PARTS, engine.recompute, copies=True)
    kept, copied = (peak_bytes(lambda m=m: predict(m).square().mean().backward()) for m in (model, copying))
    assert copied - kept >= (layers - 1) * MICRO * (TEXT + 6) * 256 * 4


@pytest.mark.parametrize("samples", slow_but([2], [1, 2]))
@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float32", "bfloat16"]))
def test_planned_memory_of_a_call_without_gradients_is_the_measured_peak(dtype: str, samples: int) -> None:
    model, _ = network(3, student_engine(dtype))
    with torch.no_grad():
        measured = peak_bytes(lambda: predict(model, samples))
    engine = EngineConfig("teacher", {}).in_precision(dtype)
    planned, _ = call_bytes(config(3), engine, LATENT, samples, accelerator=False)
    in_float32_first = dtype == "bfloat16" and not torch.cpu.get_capabilities().get("avx512_bf16")
    assert planned == pytest.approx(measured, rel=0.35 if in_float32_first else 0.15)


def test_norms_of_one_kernel_on_a_gpu_save_less_than_those_of_the_cpu() -> None:
    engine = student_engine("bfloat16")
    cpu, gpu = (
        activation_bytes(config(1), engine, LATENT, 1, accelerator=a, recomputes=False).transient
        for a in (False, True)
    )
    assert cpu - gpu == pytest.approx((8 - 2) * 256 * (3 * TOKENS + TEXT), rel=0.01)


@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("teacher_width", slow_but([512], [256, 512]))
def test_planned_memory_of_compared_hidden_states_is_the_measured_peak(
    one_rank: torch.device, teacher_width: int, dtype: str
) -> None:
    engine, layers = student_engine(dtype, checkpoint="blocks"), 6
    model, blocks = network(layers, engine, teacher_width)
    term = FeatureMatching().for_student(list(range(layers)))

    def run() -> None:
        targets = {k: torch.ones(MICRO, TOKENS, teacher_width, dtype=engine.dtype) for k in range(layers)}
        v_BCFHW = predict(model)
        features, blocks.features = blocks.features, {}
        loss_B = term.loss(Prediction(v_BCFHW, features), Prediction(v_BCFHW, targets), None)
        (v_BCFHW.square().mean() + loss_B.mean()).backward()

    planned = activation_bytes(config(layers), engine, LATENT, MICRO, accelerator=False).transient
    items = (engine.dtype.itemsize, engine.dtype.itemsize)
    planned += compared_bytes(layers, (TOKENS, TOKENS), MICRO, MICRO, (teacher_width, 256), items, engine)
    assert planned == pytest.approx(peak_bytes(run), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_memory_of_ranks_that_share_a_sample_is_their_measured_peak(dtype: str) -> None:
    engine, how = student_engine(dtype, checkpoint="blocks"), {"accelerator": False, "sharers": 2}
    passes, a_call = map(max, zip(*call(shared_peaks, 6, engine, ranks=2), strict=True))
    given = config(6), engine, LATENT, 1
    planned = activation_bytes(*given, **how).transient, call_bytes(*given, **how)[0]
    assert planned == pytest.approx((passes, a_call), rel=0.15)
