"""Students narrower than their teacher: the kept parts, and cuts that change nothing."""

import math
from dataclasses import astuple

import pytest
import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from small_wan import small_transformer
from torch import Tensor

from wandistiller.network.names import set_parameter
from wandistiller.student import calibration
from wandistiller.student.calibration import measure
from wandistiller.student.pruning import (
    CalibrationStats,
    WidthSlicer,
    fits_rope,
    rope_pairs,
    rope_units,
    strongest_cut,
)
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan import transformer
from wandistiller.wan.structure import IMAGE_MAPS, IMAGE_NORM, NORMED
from wandistiller.wan.transformer_config import TransformerConfig

WIDTH, HEADS, FFN = 64, 2, 96  # of the small network
TWICE = "norm2 to_out net.2 patch_embedding time_embedder.linear_2".split()
"""Parts whose outputs are channels of the residual stream, or of that of given frames."""
IMAGE = {"in_channels": 36, "image_dim": 24, "added_kv_proj_dim": WIDTH}
FORMS = {"text": {}, "joined": {"in_channels": 36}, "states": IMAGE}
FORMS["both ends"] = IMAGE | {"pos_embed_seq_len": 10}


@torch.no_grad()
def predict(model: WanTransformer3DModel) -> Tensor:
    blank = TransformerConfig.of(model.config).blank_state((16, 1, 8, 8), 6, text_tokens=12)
    x_t_BCFHW, _, *given = (keyed_normal(t.shape, number) for number, t in enumerate(blank.tensors()))
    return transformer.velocity(model, blank.with_tensors([x_t_BCFHW, torch.linspace(0.1, 0.9, 6), *given]))


def cut_of(
    teacher: WanTransformer3DModel, measured: CalibrationStats | None = None, **sizes: int
) -> tuple[WanTransformer3DModel, WidthSlicer]:
    """A student of all the teacher's layers, made as of `start_weights` but from a network in memory."""
    whole = TransformerConfig.of(teacher.config)
    state, config = teacher.state_dict(), whole.replaced(**sizes)
    if config.image_dim:
        config = config.replaced(added_kv_proj_dim=config.width)
    measured = measured or measure([teacher], [lambda: predict(teacher)])
    cuts = strongest_cut(config, whole, list(range(len(teacher.blocks))), measured, state.__getitem__)
    student = config.meta()
    for name, module in list(student.named_modules()):
        own = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        for leaf, value in cuts.cut(name, {leaf: state[f"{name}.{leaf}".strip(".")] for leaf in own}).items():
            assert value.shape == module.get_parameter(leaf).shape, f"{name}.{leaf}"
            set_parameter(module, leaf, value)
    return student, cuts


def widened(small: WanTransformer3DModel) -> WanTransformer3DModel:
    """A network of twice the width and feed-forward with the outputs of `small`.

    Each channel of the residual stream and of given frames is there twice, so LayerNorm has the same mean
    and variance; only the first copy is read. Heads, units and other streams get some channels without inputs
    and outputs.
    """
    keys = ("in_channels", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
    sizes = {key: small.config[key] for key in keys} | {"num_attention_heads": 2 * HEADS, "ffn_dim": 2 * FFN}
    sizes |= {"added_kv_proj_dim": 2 * WIDTH} if small.config.image_dim else {}
    wide = small_transformer(1, len(small.blocks), **sizes)
    weights = small.state_dict()
    for name, p in wide.named_parameters():
        value, new = weights[name], torch.zeros(p.shape)
        if "scale_shift_table" in name:
            new = torch.cat([value, value], dim=2)
        elif "time_proj" in name:
            rows = torch.cat([value.unflatten(0, (6, -1))] * 2, dim=1).flatten(0, 1)
            new.narrow(new.dim() - 1, 0, rows.shape[-1]).copy_(rows)
        elif any(part in name for part in NORMED):
            new = torch.cat([value, value]) / math.sqrt(2)  # half of the channels are zero: a smaller rms
        else:
            value = torch.cat([value, value]) if any(part in name for part in TWICE) else value
            new[tuple(slice(0, n) for n in value.shape)] = value
        p.data = new
    return wide


@pytest.fixture(scope="module", params=FORMS)
def small(request: pytest.FixtureRequest) -> WanTransformer3DModel:
    return small_transformer(1, 2, **FORMS[request.param]).eval()


def close(v_BCFHW: Tensor, expected_BCFHW: Tensor) -> bool:
    return (v_BCFHW - expected_BCFHW).norm().item() < 1e-4 * expected_BCFHW.norm().item()


def test_cutting_what_is_not_used_keeps_the_output(small: WanTransformer3DModel) -> None:
    wide = widened(small).eval()
    assert close(predict(wide), predict(small))
    measured = measure([wide], [lambda: predict(wide)])
    measured.stream_DD[WIDTH:] = 0  # the second copies, which nothing reads
    student, _ = cut_of(wide, measured, num_attention_heads=HEADS, ffn_dim=FFN)
    assert close(predict(student), predict(small))


def test_channels_of_given_frames_that_nothing_reads_are_cut_and_their_part_of_the_norm_is_kept() -> None:
    """Channels of 1 and -1 stay, of 0.1 and -0.1 go: LayerNorm has another rms, which the gain undoes."""
    teacher, kept = small_transformer(1, 2, **IMAGE).eval(), WIDTH // 2
    last = teacher.condition_embedder.image_embedder.ff.net[2]
    h_D = torch.tensor([1.0, -1.0]).repeat(kept) * torch.tensor([1.0, 0.1]).repeat_interleave(kept)
    with torch.no_grad():
        last.weight.zero_()
        last.bias.copy_(h_D)
        for block in teacher.blocks:
            for name in IMAGE_MAPS:
                getattr(block.attn2, name).weight[:, kept:] = 0
    _, cuts = cut_of(teacher, num_attention_heads=HEADS // 2)
    image = WidthSlicer({"image": cuts.axes["image"]}, cuts.means)
    assert cuts.axes["image"].basis.tolist() == list(range(kept))

    def keys(slicer: WidthSlicer, h_D: Tensor) -> Tensor:
        names = IMAGE_NORM, f"blocks.1.attn2.{IMAGE_MAPS[0]}"
        norm, read = (slicer.cut(n, dict(teacher.get_submodule(n).named_parameters())) for n in names)
        return F.linear(F.layer_norm(h_D, h_D.shape, **norm), **read)

    assert close(keys(image, h_D[:kept]), keys(WidthSlicer(), h_D))


@pytest.mark.parametrize("why", ["they write nothing", "they never change"])
def test_useless_feed_forward_units_are_cut_first_and_the_output_stays(why: str) -> None:
    teacher = small_transformer(1, 2).eval()
    units = torch.arange(0, FFN, 2) if why == "they write nothing" else torch.arange(2)
    for block in teacher.blocks:
        if why == "they write nothing":
            block.ffn.net[2].weight.data[:, units] = 0
        else:  # a constant goes into the bias; small, so that these are the ones cut
            block.ffn.net[0].proj.weight.data[units] = 0
            block.ffn.net[0].proj.bias.data[units] = 0.01
    student, cuts = cut_of(teacher, ffn_dim=FFN - len(units))
    kept = [i for i in range(FFN) if i not in units]
    assert all(cuts.axes[f"blocks.{b}.ffn"].basis.tolist() == kept for b in (0, 1))
    assert close(predict(student), predict(teacher))


@pytest.mark.parametrize("sizes", [{"num_attention_heads": 1}, {"attention_head_dim": 24, "ffn_dim": 8}])
def test_every_cut_has_the_shapes_of_its_config_and_a_finite_output(
    small: WanTransformer3DModel, sizes: dict
) -> None:
    student, _ = cut_of(small, **sizes)
    assert predict(student).isfinite().all()
    assert student.patch_embedding.in_channels == small.config.in_channels


def test_a_cut_of_nothing_gives_the_teacher_s_own_tensors(small: WanTransformer3DModel) -> None:
    student, cuts = cut_of(small)
    assert cuts.axes == {}
    assert all(torch.equal(p, small.state_dict()[name]) for name, p in student.named_parameters())


@pytest.mark.parametrize("head_dim", [8, 12, 16, 24, 32, 64, 96, 128])
def test_rope_s_pairs_are_those_of_diffusers_own_table(head_dim: int) -> None:
    model = small_transformer(1, 1, attention_head_dim=head_dim)
    angle_I = torch.atan2(model.rope.freqs_sin[1], model.rope.freqs_cos[1])  # at position 1: the frequencies
    expected = [math.exp(f) for _, f in rope_pairs(head_dim) for _ in range(2)]
    assert torch.allclose(angle_I, torch.tensor(expected, dtype=angle_I.dtype), atol=1e-6)


@pytest.mark.parametrize(("old", "new"), [(128, 64), (128, 96), (32, 16), (32, 24), (64, 12), (32, 32)])
def test_kept_channels_stay_on_their_axis_and_in_pairs(old: int, new: int) -> None:
    units, before, after = rope_units(old, new), rope_pairs(old), rope_pairs(new)
    assert units[1::2] == [u + 1 for u in units[::2]] and len(set(units)) == new
    assert [before[u // 2][0] for u in units[::2]] == [axis for axis, _ in after]


def test_a_head_whose_axes_halve_keeps_every_second_pair_and_one_that_is_not_cut_all() -> None:
    # 48 = 16 + 16 + 16 and 24 = 8 + 8 + 8: theta^(-2 i / 8) = theta^(-2 (2 i) / 16)
    assert [u // 2 for u in rope_units(48, 24)[::2]] == list(range(0, 24, 2))
    assert rope_units(32, 32) == list(range(32))


def test_a_head_with_more_time_channels_than_the_teacher_s_does_not_fit() -> None:
    assert not fits_rope(18, 16) and fits_rope(32, 16)  # 18 = 6 + 6 + 6, 16 = 8 + 4 + 4


def test_sums_are_the_same_in_small_parts(
    small: WanTransformer3DModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A video's activations are not converted to float64 all at once."""
    whole = measure([small], [lambda: predict(small)])
    monkeypatch.setattr(calibration, "AT_ONCE", 1000)
    parts = measure([small], [lambda: predict(small)])
    assert whole.moments.keys() == parts.moments.keys()
    for name, moments in whole.moments.items():
        for whole_D, parts_D in zip(astuple(moments), astuple(parts.moments[name]), strict=True):
            assert torch.allclose(whole_D, parts_D, rtol=1e-6), name
    assert torch.allclose(whole.stream_DD, parts.stream_DD, rtol=1e-5, atol=1e-7)


def test_activations_of_blocks_that_were_compiled_in_an_earlier_call_are_measured() -> None:
    network = small_transformer(1, 2).eval()
    plain = measure([network], [lambda: predict(network)])
    for block in network.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    predict(network)
    measured = measure([network], [lambda: predict(network)])
    assert measured.moments.keys() == plain.moments.keys()
    assert torch.equal(measured.stream_DD, plain.stream_DD)
