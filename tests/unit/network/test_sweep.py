"""Several batches go through a network's blocks together, and each gets what it gets alone."""

from pathlib import Path

import pytest
import torch
from networks import network_of
from shipped import placement
from small_wan import small_transformer
from states import state

from wandistiller.batch import Batch, Prediction
from wandistiller.experts import Expert
from wandistiller.network.block_source import BUFFERS
from wandistiller.network.network import Network
from wandistiller.network.sweep import backward_together, block_by_block
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher, Teacher
from wandistiller.teacher.build import build_teacher
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.pipeline import open_wan

SIZES = [(2, 4, 9), (1, 6, 5), (3, 4, 7)]
"""Samples, height and rows of text of three batches."""
NULL_LD = keyed_normal((12, 32), "null")


def batches(*experts: Expert) -> list[Batch]:
    made = []
    for i, ((samples, height, rows), expert) in enumerate(zip(SIZES, experts, strict=True)):
        x_t = keyed_normal((samples, 16, 1, height, 4), "x", i)
        text = keyed_normal((samples, rows, 32), "text", i)
        made.append(state(x_t, torch.linspace(0.9, 0.1, samples), text, expert))
    return made


HIGH, LOW = Expert
MIXED = batches(HIGH, LOW, HIGH)


def networks() -> dict[Expert, Network]:
    return {e: network_of(small_transformer(seed, 4).eval()) for seed, e in enumerate(Expert)}


def guided(inner: Teacher, passes: int) -> GuidedTeacher:
    return GuidedTeacher(inner, Guidance(NULL_LD, {HIGH: 4.0, LOW: 1.0}), passes)


def same(one: Prediction, other: Prediction) -> bool:
    return torch.equal(one.v_BCFHW, other.v_BCFHW) and all(
        torch.equal(one.features[k], other.features[k]) for k in other.features
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_batches_of_two_experts_together_have_the_predictions_that_they_have_alone_bitwise(
    passes: int,
) -> None:
    alone, together = (guided(LocalTeacher(networks(), sweeps=s), passes) for s in (False, True))
    expected = [alone.predict(batch, (0, 3)) for batch in MIXED]
    assert all(map(same, together.predict_all(MIXED, (0, 3)), expected))
    assert sorted(expected[0].features) == [0, 3]


def test_no_batch_enters_a_block_before_all_have_finished_the_one_before() -> None:
    model, order = small_transformer(0, 4).eval(), []
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: order.append(number))
    teacher = LocalTeacher(dict.fromkeys(Expert, network_of(model)), sweeps=True)
    teacher.predict_all(batches(HIGH, HIGH, HIGH), ())
    assert order == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_calls_have_their_own_modes_of_gradients_and_autocast_however_they_take_turns() -> None:
    blocks, x = [torch.nn.Linear(4, 4) for _ in range(3)], keyed_normal((2, 4), "x")

    def plain() -> torch.Tensor:
        return torch.nn.Sequential(*blocks)(x)

    def in_bf16() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.Sequential(*blocks[:2])(x)

    def without_gradients() -> torch.Tensor:
        with torch.no_grad():
            return plain()

    calls = [in_bf16, plain, without_gradients, in_bf16]
    expected, found = [call() for call in calls], block_by_block(blocks, calls)
    assert all(map(torch.equal, found, expected))
    assert [(y.dtype, y.requires_grad) for y in found] == [(y.dtype, y.requires_grad) for y in expected]
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_an_error_in_one_call_is_raised_and_no_hook_stays() -> None:
    model = small_transformer(0, 2).eval()

    def fail(*_: object) -> None:
        raise MemoryError("of the second block")

    failing = model.blocks[1].register_forward_hook(fail)
    teacher = LocalTeacher(dict.fromkeys(Expert, network_of(model)), sweeps=True)
    with pytest.raises(MemoryError, match="of the second block"):
        teacher.predict_all(batches(HIGH, HIGH, HIGH), (0,))
    failing.remove()
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.blocks)


def test_calls_that_go_through_no_block_are_made_one_after_the_other() -> None:
    assert block_by_block([], [lambda: 1, lambda: 2]) == [1, 2]


def test_backward_passes_made_as_one_give_each_its_gradients_bitwise_and_end_for_themselves() -> None:
    x, order = keyed_normal((2, 4), "x"), []
    models = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))) for _ in range(2)]

    def backward(number: int) -> None:
        loss = models[number](x).square().sum()
        order.append(f"before {number}")
        loss.backward()
        order.append(f"after {number}")

    def gradients() -> list[torch.Tensor]:
        found = [p.grad for model in models for p in model.parameters()]
        for model in models:
            model.zero_grad()
        return found

    backward(0), backward(1)
    expected = gradients()
    order.clear()
    backward_together([lambda: backward(0), lambda: backward(1)])
    assert all(map(torch.equal, gradients(), expected))
    assert order == ["before 0", "before 1", "after 0", "after 1"]


# Blocks that come from CPU memory


@pytest.fixture
def streamed(wan2: Path, one_rank: torch.device) -> LocalTeacher:
    return build_teacher(open_wan(str(wan2)), placement("streamed", "float32"))


def buffers(model: Network) -> list[torch.UntypedStorage]:
    """The storages that the blocks' parameters are in, in the order of the blocks."""
    found = {}
    for block in model.blocks:
        for p in block.parameters():
            found[p.untyped_storage().data_ptr()] = p.untyped_storage()
    return list(found.values())


def test_all_blocks_of_both_experts_share_two_buffers_of_the_largest_block(streamed: LocalTeacher) -> None:
    high, low = streamed.experts.values()
    block = sum(-(-p.nbytes // 64) * 64 for p in high.blocks[0].parameters())
    assert [s.nbytes() for s in buffers(high)] == [block] * BUFFERS
    assert [s.data_ptr() for s in buffers(high)] == [s.data_ptr() for s in buffers(low)]


def test_while_a_block_is_computed_the_next_one_arrives_in_the_other_buffer(
    streamed: LocalTeacher, wan2: Path
) -> None:
    model, there = streamed.experts[HIGH].module, []
    whole = type(model).from_pretrained(wan2 / "transformer")

    def look(number: int) -> None:
        following = (number + 1) % len(model.blocks)
        mine, theirs = (dict(m.blocks[following].named_parameters()) for m in (model, whole))
        there.append(all(torch.equal(mine[name], theirs[name]) for name in theirs))

    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, number=number: look(number))
    streamed.predict_all(batches(HIGH, HIGH, HIGH), ())
    assert there == [True] * 3 * len(model.blocks)


def test_a_sweep_copies_each_block_once(streamed: LocalTeacher, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copy = [], torch.Tensor.copy_

    def counted(self: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        if self.dtype is torch.uint8:
            copies.append(len(source))
        return copy(self, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    layers = len(streamed.experts[HIGH].blocks)
    for sweep in range(1, 4):
        streamed.predict_all(batches(HIGH, HIGH, HIGH), ())
        assert len(copies) == sweep * layers + 1  # the first of the next sweep is there already


def test_weights_do_not_change_under_a_call_for_another_expert(streamed: LocalTeacher, wan2: Path) -> None:
    whole = {
        e: network_of(type(network.module).from_pretrained(wan2 / e.value))
        for e, network in streamed.experts.items()
    }
    for batch in MIXED * 2:
        assert same(streamed.predict(batch, (1,)), LocalTeacher(whole).predict(batch, (1,)))
