"""Students narrower or shallower than the teacher they start from: what is kept, and what the cut leaves as it was."""

import math
from dataclasses import astuple

import pytest
import torch
from diffusers import WanTransformer3DModel
from small_wan import transformer
from torch import Tensor

from wandistiller import activations, wan
from wandistiller.activations import measure
from wandistiller.batch import Batch, Expert
from wandistiller.cuts import Axis, Cuts
from wandistiller.noise import keyed_normal
from wandistiller.prune import fits_rope, plan, rope_pairs, rope_units

WIDTH, HEADS, HEAD_DIM, FFN = 64, 2, 32, 96  # of the small network


def batch(n: int = 6) -> Batch:
    x_BCFHW = keyed_normal((n, 16, 1, 8, 8), "x")
    sigma_B = torch.linspace(0.1, 0.9, n)
    return Batch(x_BCFHW, x_BCFHW, x_BCFHW, sigma_B, keyed_normal((n, 12, 32), "text"), Expert.HIGH_NOISE)


@torch.no_grad()
def answer(model: WanTransformer3DModel) -> Tensor:
    b = batch()
    return wan.velocity(model, b.x_t_BCFHW, b.sigma_B, b.text_BLD)


def cut_of(teacher: WanTransformer3DModel, basis: str = "channels", units: str = "activation",
           **sizes: int) -> tuple[WanTransformer3DModel, Cuts]:  # fmt: skip
    """A student of all the teacher's layers, made as `start_model` makes it but from a network in memory."""
    state, config = teacher.state_dict(), dict(teacher.config) | sizes
    measured = measure([teacher], lambda: answer(teacher))
    cuts = plan(config, dict(teacher.config), list(range(len(teacher.blocks))), measured, state.__getitem__, basis, units)
    student = wan.skeleton(config)
    for name, module in list(student.named_modules()):
        own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        for leaf, value in cuts.cut(name, {leaf: state[f"{name}.{leaf}".strip(".")] for leaf in own}).items():
            assert value.shape == module.get_parameter(leaf).shape, f"{name}.{leaf}"
            wan.put(module, leaf, value)
    return student, cuts


def widened(small: WanTransformer3DModel) -> WanTransformer3DModel:
    """A network of twice the width and feed-forward that answers as `small` does.

    Each channel of the residual stream is there twice, so that LayerNorm sees the same mean and variance, and only the first
    copy is read; heads, units and channels of the other streams are joined by ones that nothing goes into or comes out of.
    """
    wide = transformer(1, len(small.blocks), num_attention_heads=2 * HEADS, ffn_dim=2 * FFN)
    given = small.state_dict()
    for name, p in wide.named_parameters():
        value = given[name]
        twice = any(part in name for part in ("scale_shift_table", "norm2", "to_out", "ffn.net.2", "patch_embedding", "time_proj",
                                              "time_embedder.linear_2"))  # fmt: skip
        new = torch.zeros(p.shape)
        if "scale_shift_table" in name:
            new = torch.cat([value, value], dim=2)
        elif "time_proj" in name:
            rows = torch.cat([value.unflatten(0, (6, -1))] * 2, dim=1).flatten(0, 1)
            new.narrow(new.dim() - 1, 0, rows.shape[-1]).copy_(rows)
        elif "norm_q" in name or "norm_k" in name:
            new = torch.cat([value, value]) / math.sqrt(2)  # half of the channels are zero, so the rms is smaller by this
        else:
            value = torch.cat([value, value]) if twice else value
            new[tuple(slice(0, n) for n in value.shape)] = value
        p.data = new
    return wide


@pytest.fixture(scope="module")
def small() -> WanTransformer3DModel:
    return transformer(1, 2).eval()


@pytest.fixture(scope="module")
def wide(small: WanTransformer3DModel) -> WanTransformer3DModel:
    return widened(small).eval()


def close(found: Tensor, expected: Tensor) -> bool:
    return (found - expected).norm().item() < 1e-4 * expected.norm().item()


def test_the_widened_network_answers_as_the_small_one(small: WanTransformer3DModel, wide: WanTransformer3DModel) -> None:
    assert close(answer(wide), answer(small))


def test_cutting_what_is_not_used_leaves_the_answer(small: WanTransformer3DModel, wide: WanTransformer3DModel) -> None:
    student, _ = cut_of(wide, "truncate", num_attention_heads=HEADS, ffn_dim=FFN)
    assert close(answer(student), answer(small))


@pytest.mark.parametrize("units", ["activation", "weight"])
def test_feed_forward_units_that_write_nothing_are_cut_first(small: WanTransformer3DModel, units: str) -> None:
    teacher = transformer(1, 2).eval()
    silent = torch.arange(0, FFN, 2)
    for block in teacher.blocks:
        block.ffn.net[2].weight.data[:, silent] = 0
    student, cuts = cut_of(teacher, units=units, ffn_dim=FFN // 2)
    assert cuts.axes["blocks.1.ffn"].basis.tolist() == list(range(1, FFN, 2))
    assert close(answer(student), answer(teacher))


def test_a_feed_forward_unit_that_never_changes_goes_into_the_bias(small: WanTransformer3DModel) -> None:
    teacher = transformer(1, 2).eval()
    for block in teacher.blocks:
        block.ffn.net[0].proj.weight.data[:2] = 0
        block.ffn.net[0].proj.bias.data[:2] = 0.01  # small, so that these are the ones cut
    student, cuts = cut_of(teacher, ffn_dim=FFN - 2)
    assert cuts.axes["blocks.0.ffn"].basis.tolist() == list(range(2, FFN))
    assert close(answer(student), answer(teacher))


@pytest.mark.parametrize("basis", ["channels", "principal", "truncate"])
@pytest.mark.parametrize("sizes", [{"num_attention_heads": 1}, {"attention_head_dim": 24, "ffn_dim": 8}])
def test_every_cut_has_the_shapes_of_its_config_and_answers(small: WanTransformer3DModel, basis: str, sizes: dict) -> None:
    student, _ = cut_of(small, basis, **sizes)
    assert answer(student).isfinite().all()


def test_a_cut_of_nothing_gives_the_teacher_s_own_tensors(small: WanTransformer3DModel) -> None:
    student, cuts = cut_of(small)
    assert cuts.axes == {}
    assert all(torch.equal(p, small.state_dict()[name]) for name, p in student.named_parameters())


def test_principal_directions_are_orthonormal_and_map_ones_to_ones(small: WanTransformer3DModel) -> None:
    basis_Dd = cut_of(small, "principal", num_attention_heads=1)[1].axes["stream"].basis
    assert torch.allclose(basis_Dd.T @ basis_Dd, torch.eye(32), atol=1e-5)
    assert torch.allclose(basis_Dd.T @ torch.full((WIDTH,), WIDTH**-0.5), torch.full((32,), 32**-0.5), atol=1e-5)


@pytest.mark.parametrize("head_dim", [8, 12, 16, 24, 32, 64, 96, 128])
def test_rope_s_pairs_are_those_of_diffusers_own_table(head_dim: int) -> None:
    model = transformer(1, 1, attention_head_dim=head_dim)
    angle_I = torch.atan2(model.rope.freqs_sin[1], model.rope.freqs_cos[1])  # at position 1: the frequencies
    expected = [math.exp(f) for _, f in rope_pairs(head_dim) for _ in range(2)]
    assert torch.allclose(angle_I, torch.tensor(expected, dtype=angle_I.dtype), atol=1e-6)


def test_a_head_that_keeps_its_width_keeps_its_channels_in_order() -> None:
    assert rope_units(32, 32) == list(range(32))


@pytest.mark.parametrize(("old", "new"), [(128, 64), (128, 96), (32, 16), (32, 24), (64, 12)])
def test_kept_channels_stay_on_their_axis_and_in_pairs(old: int, new: int) -> None:
    units, before, after = rope_units(old, new), rope_pairs(old), rope_pairs(new)
    assert units[1::2] == [u + 1 for u in units[::2]] and len(set(units)) == new
    assert [before[u // 2][0] for u in units[::2]] == [axis for axis, _ in after]


def test_halving_a_head_whose_axes_halve_keeps_every_second_pair_exactly() -> None:
    # 48 = 16 + 16 + 16 and 24 = 8 + 8 + 8: theta^(-2 i / 8) = theta^(-2 (2 i) / 16)
    assert [u // 2 for u in rope_units(48, 24)[::2]] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]


def test_a_head_with_more_time_channels_than_the_teacher_s_does_not_fit() -> None:
    assert not fits_rope(18, 16) and fits_rope(32, 16)  # 18 = 6 + 6 + 6, 16 = 8 + 4 + 4


def test_what_an_axis_does_not_hold_is_lost() -> None:
    mean_D = torch.tensor([1.0, 2.0, 3.0])
    assert Axis(torch.tensor([0, 2])).lost(mean_D).tolist() == [0, 2, 0]
    assert Axis(torch.tensor([[0.0], [0.0], [1.0]])).lost(mean_D).tolist() == [1, 2, 0]


def test_sums_are_the_same_in_small_parts(small: WanTransformer3DModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A video's activations are not taken to float64 all at once."""
    whole = measure([small], lambda: answer(small))
    monkeypatch.setattr(activations, "AT_ONCE", 1000)
    parts = measure([small], lambda: answer(small))
    assert whole.moments.keys() == parts.moments.keys()
    for name, moments in whole.moments.items():
        for whole_D, parts_D in zip(astuple(moments), astuple(parts.moments[name]), strict=True):
            assert torch.allclose(whole_D, parts_D, rtol=1e-6), name
    assert torch.allclose(whole.stream_DD, parts.stream_DD, rtol=1e-5, atol=1e-7)


def test_kept_units_are_written_as_ranges() -> None:
    assert Axis(torch.tensor([0, 1, 2, 5, 7, 8])).in_words() == "0-2 5 7-8"
