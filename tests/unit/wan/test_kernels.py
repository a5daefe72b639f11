"""Kernels of the blocks: the same numbers, and nothing changed for other networks."""

from pathlib import Path

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from engines import batch_for, engine, learner_of, loaded
from networks import network_of
from published_wan import LARGE
from shipped import placement
from small_wan import small_transformer
from traffic import CudaKernels, FusedTraffic, Traffic

from wandistiller.engine.compiler import compiled
from wandistiller.engine.engine_config import Kernels
from wandistiller.network.network import Computing, Network, Trained
from wandistiller.planner.time import EAGER
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.kernels import WanTransformerBlock, use_kernels
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer import renew_rope
from wandistiller.wan.transformer_config import TransformerConfig


def test_another_attention_is_that_of_the_patches_of_one_network_alone() -> None:
    usual, model = _AttentionBackendRegistry.get_active_backend(), small_transformer(0, 2)
    use_kernels(model, Kernels(attention="_native_cudnn"))
    for block in model.blocks:
        assert block.attn1.processor._attention_backend == "_native_cudnn"
        assert block.attn2.processor._attention_backend is None
    assert _AttentionBackendRegistry.get_active_backend() == usual
    assert small_transformer(0, 2).blocks[0].attn1.processor._attention_backend is None


def block_pass(computing: Computing | None) -> list[tuple[float, int]]:
    """Bytes for each number of the state, and kernels, of a 14B's block with adapters: forward, backward.

    In bf16, 4 images of 480 x 832 and prompts of 36 tokens with 3 rows for their padding.
    """
    config, meta = TransformerConfig.usual(**LARGE).replaced(num_layers=1), torch.device("meta")
    network = Network.made(config).prepare(Trained(lora={"rank": 64}), computing=computing)
    for name, p in network.module.to(meta).named_parameters():
        p.data = p.data.to(config.dtype_of(name, torch.bfloat16))
    with meta:
        shapes = (4, 1560, config.width), (4, 39, config.width), (4, 6, config.width)
        x_BSD, text_BLD, time_B6D = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        rope = torch.empty(1, 1560, 1, 128), torch.empty(1, 1560, 1, 128)
    with Traffic() as traffic, CudaKernels(traffic):
        out_BSD = network.blocks[0](x_BSD.requires_grad_(), text_BLD, time_B6D, rope)
        forward = traffic.total / x_BSD.numel(), traffic.kernels
        out_BSD.backward(torch.empty_like(out_BSD))
    both = traffic.total / x_BSD.numel(), traffic.kernels
    return [forward, (both[0] - forward[0], both[1] - forward[1])]


def test_an_eager_block_has_fewer_kernels_and_bytes_than_that_of_diffusers() -> None:
    """Of all but products of matrices and attention."""
    stock, lean = block_pass(None), block_pass(Computing())
    assert [n for _, n in stock] == [56, 75] and [n for _, n in lean] == [45, 41]
    assert [nbytes for nbytes, _ in stock] == pytest.approx([285.4, 368.5], abs=0.1)
    assert [nbytes for nbytes, _ in lean] == pytest.approx([245.4, 280.5], abs=0.1)
    assert [nbytes for nbytes, _ in lean] == pytest.approx([*EAGER], abs=0.6)


@pytest.mark.slow  # a minute
@torch._inductor.config.patch(force_disable_caches=True)  # monkeypatch would leave none (torch 2.13)
def test_a_compiled_block_moves_at_most_105_and_140_bytes_for_each_number_of_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without gradients, forward, backward, as inductor fuses for a CPU; for GPUs it was not counted."""
    config = TransformerConfig.usual(**LARGE).replaced(num_layers=1)
    network = Network.made(config).prepare(Trained(lora={"rank": 64}))
    for name, p in network.module.to_empty(device="cpu").named_parameters():
        p.data = torch.empty(p.shape, dtype=config.dtype_of(name, torch.bfloat16))
    shapes = (4, 1560, config.width), (4, 39, config.width), (4, 6, config.width)
    x_BSD, text_BLD, time_B6D = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    rope = torch.empty(1, 1560, 1, 128), torch.empty(1, 1560, 1, 128)
    block, found = compiled(network.blocks[0].forward), []
    torch.compiler.reset()
    for has_gradients in (False, True):
        traffic = FusedTraffic(monkeypatch)
        with torch.set_grad_enabled(has_gradients):
            out_BSD = block(x_BSD.requires_grad_(has_gradients), text_BLD, time_B6D, rope)
        found.append(traffic.total / x_BSD.numel())
    traffic = FusedTraffic(monkeypatch)
    out_BSD.backward(torch.empty_like(out_BSD))
    without, forward, backward = *found, traffic.total / x_BSD.numel()
    torch.compiler.reset()
    assert 0 < without <= 105 and 0 < forward <= 105 and 0 < backward <= 140


@pytest.mark.parametrize("of_each_patch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eager_network_has_the_bits_of_diffusers(dtype: torch.dtype, of_each_patch: bool) -> None:
    """Gradients too, but in bf16, where fewer of their sums are rounded."""
    plain, lean = (small_transformer(0, 2).to(dtype) for _ in range(2))
    renew_rope(plain), renew_rope(lean)
    network_of(lean).prepare(computing=Computing())
    batch, found = batch_for(plain), []
    time_BS = torch.tensor([[0.0, 900.0, 900.0, 900.0]]).repeat(2, 1)
    for model in (plain, lean):
        out_BCFHW = model(
            hidden_states=batch.x_t_BCFHW.to(dtype),
            timestep=time_BS if of_each_patch else time_BS[:, 1],
            encoder_hidden_states=batch.conditioning.text_BLD.to(dtype),
        ).sample
        (out_BCFHW * keyed_normal(out_BCFHW.shape, "slope")).sum().backward()
        found.append([out_BCFHW, *(p.grad for p in model.parameters())])
    assert isinstance(lean.blocks[0], WanTransformerBlock)
    (output, *gradients), (lean_output, *lean_gradients) = found
    assert torch.equal(output, lean_output)
    if dtype == torch.float32:
        assert all(map(torch.equal, gradients, lean_gradients))
    one, other = (torch.cat([g.flatten() for g in each]).float() for each in (gradients, lean_gradients))
    assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.slow  # minutes of compiling
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["streamed", "zero_inference_cpu", "replicated"])
def test_a_compiled_teacher_predicts_what_it_predicts_eagerly(name: str, wan1: Path) -> None:
    folder, found = open_wan(str(wan1)), []
    for is_compiled in (False, True):
        placed = placement(name, "float32", compile=is_compiled)
        teacher = build_teacher(folder, placed, merges_padding=True)
        batch = batch_for(loaded(wan1 / "transformer"))
        found.append([p.v_BCFHW for p in teacher.predict_all([batch, batch], (1,))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_compiled_student_learns_what_it_learns_eagerly(wan1: Path, recomputed: bool) -> None:
    found = []
    for is_compiled in (False, True):
        section = {"activation_checkpointing": {"partition_activations": False}} if recomputed else {}
        block = {"wandistiller": {"compile": is_compiled}}
        config = engine(zero_optimization={"stage": 2}, **section, **block)
        learner = learner_of(small_transformer(3, 2), config)
        batch, losses = batch_for(loaded(wan1 / "transformer")), []
        for _ in range(3):
            loss = learner.velocity(batch).square().mean()
            learner.backward(batch.expert, loss)
            learner.step(batch.expert)
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[0][2] < found[0][0]
