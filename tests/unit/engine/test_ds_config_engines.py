"""DeepSpeed's engines around a student: stage 0, all forms of activation checkpointing, refused settings."""

import math
from collections import Counter
from itertools import product
from typing import Any

import deepspeed
import pytest
import torch
import torch.utils.cpp_extension
from deepspeed.accelerator import get_accelerator
from engines import learner_of
from plain import MixedAdamW
from recipes import ADAM, TORCH_ADAM
from slow_cases import slow_but
from small_wan import small_transformer
from states import state
from torch import Tensor

from wandistiller.batch import Batch
from wandistiller.distributed import device
from wandistiller.engine import extensions, preflight
from wandistiller.engine.ds_config import load, student_engine
from wandistiller.engine.engine_config import EngineConfig, Kernels
from wandistiller.engine.optimizer_state import read_engine, write_engine
from wandistiller.engine.preflight import config_problems
from wandistiller.experts import Expert
from wandistiller.wan import transformer
from wandistiller.wan.kernels import use_kernels

LAYERS = 3


def batch(seed: int) -> Batch:
    """Two random samples."""
    torch.manual_seed(seed)
    x_BCFHW = torch.randn(2, 16, 1, 8, 8)
    return state(x_BCFHW, torch.rand(2), torch.randn(2, 7, 32))


def engine_of(**more: Any) -> EngineConfig:
    ds = {"train_micro_batch_size_per_gpu": 2, "optimizer": TORCH_ADAM, **more}
    return student_engine(load(ds), 1)


def curve(config: EngineConfig, steps: int = 5) -> list[float]:
    """Losses of a student that learns to predict zero."""
    student = learner_of(small_transformer(0, LAYERS), config)
    engine, losses = student.engine(Expert.HIGH_NOISE), []
    for step in range(steps):
        loss = student.velocity(batch(step)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def plain_bf16_curve(steps: int = 5) -> list[float]:
    """The same without DeepSpeed: bf16 weights, float32 masters made from them, torch's AdamW."""
    model = small_transformer(0, LAYERS).bfloat16()
    transformer.renew_rope(model)
    use_kernels(model, Kernels())  # a student's, whose gradients are rounded as often
    optimizer, losses = MixedAdamW(model), []
    for step in range(steps):
        b = batch(step)
        loss = transformer.velocity(model, b).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("stage", "tolerance"), slow_but([(0, 1e-6), (2, 1e-6)], [(0, 1e-6), (1, 1e-6), (2, 1e-6), (3, 3e-3)])
)
def test_every_stage_learns_as_plain_pytorch_in_bf16(stage: int, tolerance: float) -> None:
    # stage 3's hooks change the order in which autograd sums the text's gradient over the blocks, which
    # rounds in bf16, and differently on each kind of CPU
    config = engine_of(bf16={"enabled": True}, zero_optimization={"stage": stage})
    assert curve(config) == pytest.approx(plain_bf16_curve(), rel=tolerance)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("more", [{}, {"bf16": {"enabled": True}}], ids=["float32", "bf16"])
def test_a_single_rank_s_gradients_are_not_copied_to_be_reduced(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sent = engine_of(zero_optimization={"stage": 0}, **more), []
    monkeypatch.setattr(deepspeed.comm, "all_reduce", lambda tensor, *_, **__: sent.append(tensor.numel()))
    curve(config)
    assert all(numel == 1 for numel in sent)  # numbers, such as whether a gradient overflowed


@pytest.mark.usefixtures("one_rank")
def test_deepspeed_s_own_stage_0_counts_a_step_before_the_first() -> None:
    """The cause of its other curve; when this fails, `without_dummy_step` may go."""
    model = small_transformer(0, 1)
    ds = engine_of(bf16={"enabled": True}, zero_optimization={"stage": 0}).for_deepspeed
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=ds)
    assert {s["step"].item() for s in engine.optimizer.optimizer.state.values()} == {1.0}


CHECKPOINTED = {
    "no key": {},
    "profiled": {"profile": True, "synchronize_checkpoint_boundary": True, "number_checkpoints": LAYERS},
    "partitioned": {"partition_activations": True},
    "partitioned on the CPU": {"partition_activations": True, "cpu_checkpointing": True},
}
MODULES = [
    {"checkpoint_every": 2},
    {"checkpoint": "attention"},
    {"checkpoint": "feed_forward", "checkpoint_every": 2},
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("before", "after"), [(0, 128), (64, 128), (128, 0)])
def test_a_fixed_loss_scale_is_the_json_s_whatever_it_was_before(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # nothing is computed
    first, second = (
        learner_of(
            small_transformer(0, LAYERS),
            engine_of(fp16={"enabled": True, "loss_scale": scale, "initial_scale_power": 11}),
        ).trained[Expert.HIGH_NOISE]
        for scale in (before, after)
    )
    write_engine(second, read_engine(first), set())
    assert second.engine.optimizer.loss_scale == (after or 2**11)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", slow_but([1], [1, 2, 3]))
def test_a_gradient_that_is_not_finite_at_the_least_loss_scale_is_a_lost_update(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)  # a CPU is only slow
    fp16 = {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 1, "hysteresis": 1}
    config = engine_of(fp16=fp16, zero_optimization={"stage": stage})
    student, found = learner_of(small_transformer(0, LAYERS), config), []
    for _ in range(3):
        student.backward(Expert.HIGH_NOISE, math.inf * student.velocity(batch(0)).square().mean())
        student.step(Expert.HIGH_NOISE)
        state = student.state(Expert.HIGH_NOISE)
        found.append((state["skipped"], state["loss_scale"], student.lost_update(Expert.HIGH_NOISE)))
    assert found == [(True, 1, False), (True, 1, True), (True, 1, True)]


def gradients(config: EngineConfig) -> dict[str, Tensor]:
    model = small_transformer(0, LAYERS)
    student = learner_of(model, config)
    student.engine(Expert.HIGH_NOISE).backward(student.velocity(batch(0)).square().mean())
    return {name: deepspeed.utils.safe_get_full_grad(p).clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def reference() -> dict[str, Tensor]:
    """Gradients by plain autograd."""
    model, b = small_transformer(0, LAYERS).train(), batch(0)
    transformer.velocity(model, b).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


ON_CPU = "partitioned on the CPU"
USUAL = [("no key", 2, {}), (ON_CPU, 2, {}), (ON_CPU, 3, {}), ("no key", 3, MODULES[0])]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("section", "stage", "block"),
    slow_but(USUAL, [*product(CHECKPOINTED, (2, 3), [{}]), *product(("no key", ON_CPU), (2, 3), MODULES)]),
    ids=str,
)
def test_checkpointed_gradients_equal_plain_autograd_s(
    section: str, stage: int, block: dict[str, Any], reference: dict[str, Tensor]
) -> None:
    how = {"activation_checkpointing": CHECKPOINTED[section], "wandistiller": block}
    config = engine_of(zero_optimization={"stage": stage}, **how)
    torch.testing.assert_close(gradients(config), reference, rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("block", "blocks", "attentions", "feed_forwards"),
    [
        ({}, 6, 6, 6),
        ({"checkpoint_every": 2}, 5, 5, 5),
        ({"checkpoint_but_last": 2}, 4, 4, 4),
        ({"checkpoint": "attention"}, 3, 6, 3),
        ({"checkpoint": "feed_forward"}, 3, 3, 6),
    ],
    ids=str,
)
def test_only_what_is_named_is_computed_twice(
    block: dict[str, Any], blocks: int, attentions: int, feed_forwards: int
) -> None:
    model = small_transformer(0, LAYERS)
    student = learner_of(model, engine_of(activation_checkpointing={}, wandistiller=block))
    calls = Counter()
    for b, name in product(model.blocks, ("", "attn1.to_q", "ffn.net.2")):
        b.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    student.engine(Expert.HIGH_NOISE).backward(student.velocity(batch(0)).square().mean())
    assert calls == {"": blocks, "attn1.to_q": attentions, "ffn.net.2": feed_forwards}


PLAIN = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
NVME = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "swap"}}


def on_a_gpu_without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device, extensions):
        monkeypatch.setattr(module, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(preflight.AsyncIOBuilder, "is_compatible", lambda *_, **__: True)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"optimizer": ADAM}, ""),
        ({"optimizer": PLAIN}, ""),
        ({"optimizer": ADAM, "zero_optimization": OFFLOADED}, ""),
        ({"optimizer": PLAIN, "zero_optimization": NVME}, "zero_optimization.offload_optimizer.device"),
    ],
)
def test_what_needs_nvcc_on_a_gpu_is_refused_where_there_is_none(
    more: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu_without_nvcc(monkeypatch)
    problems = config_problems(EngineConfig("x.json", {"train_micro_batch_size_per_gpu": 2} | more))
    assert len(problems) == bool(key)
    assert all(f"`{key}`" in p and "Install the CUDA toolkit" in p for p in problems)


def test_torch_s_fused_adam_replaces_deepspeed_s_on_gpus_without_nvcc_and_there_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = EngineConfig("x.json", {"optimizer": ADAM, "zero_optimization": {"stage": 2}})
    offloaded = plain.replaced(zero_optimization=OFFLOADED)
    assert extensions.with_fused_adam(plain) == plain
    on_a_gpu_without_nvcc(monkeypatch)
    assert extensions.with_fused_adam(offloaded) == offloaded
    params = extensions.with_fused_adam(plain).section("optimizer.params")
    assert params == ADAM["params"] | {"torch_adam": True, "fused": True}
