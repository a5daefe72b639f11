"""Kernels of the blocks: the same numbers, and nothing changed for other networks."""

from pathlib import Path

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from engines import batch_for, engine, learner_of, loaded
from shipped import placement
from small_wan import small_transformer

from wandistiller.engine.engine_config import Kernels
from wandistiller.teacher.build import build_teacher
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.transformer import use_kernels


def test_another_attention_is_that_of_the_patches_of_one_network_alone() -> None:
    usual, model = _AttentionBackendRegistry.get_active_backend(), small_transformer(0, 2)
    use_kernels(model, Kernels(attention="_native_cudnn"))
    for block in model.blocks:
        assert block.attn1.processor._attention_backend == "_native_cudnn"
        assert block.attn2.processor._attention_backend is None
    assert _AttentionBackendRegistry.get_active_backend() == usual
    assert small_transformer(0, 2).blocks[0].attn1.processor._attention_backend is None


@pytest.mark.slow  # minutes of compiling
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["streamed", "zero_inference_cpu", "replicated"])
def test_a_compiled_teacher_predicts_what_it_predicts_eagerly(name: str, wan1: Path) -> None:
    folder, found = open_wan(str(wan1)), []
    for compiled in (False, True):
        placed = placement(name, "float32", compile=compiled)
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
    for compiled in (False, True):
        section = {"activation_checkpointing": {"partition_activations": False}} if recomputed else {}
        block = {"wandistiller": {"compile": compiled}}
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
