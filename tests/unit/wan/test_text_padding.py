"""Cross-attention through a few rows that stand for all padding equals that to all 512 rows."""

import math
from functools import partial

import pytest
import torch
from diffusers import WanTransformer3DModel
from published_wan import LARGE, SMALL
from small_wan import small_transformer
from states import state
from torch import Tensor

from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.teacher.base import Guidance, GuidedTeacher, LocalTeacher
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.text_padding import STAND_INS, merge_text_padding, network_text, row_bias
from wandistiller.wan.transformer import velocity

LENGTHS = [0, 1, 7, 40]


def texts(lengths: list[int], width: int = 32) -> Tensor:
    """Random states of prompts of these lengths, zero-padded to the longest."""
    text_BLD = keyed_normal((len(lengths), max(lengths), width), "text")
    for text_LD, length in zip(text_BLD, lengths, strict=True):
        text_LD[length:] = 0
    return text_BLD


def outputs(model: WanTransformer3DModel, lengths: list[int]) -> Tensor:
    x_t_BCFHW = keyed_normal((len(lengths), model.config.in_channels, 1, 8, 8), "x")
    sigma_B = torch.linspace(0.1, 1, len(lengths))
    return velocity(model, state(x_t_BCFHW, sigma_B, texts(lengths, model.config.text_dim)))


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-12), (torch.float16, 1e-6), (torch.bfloat16, 1e-5)]
)
def test_stand_ins_weigh_in_the_softmax_what_the_padding_weighs(dtype: torch.dtype, error: float) -> None:
    for length in (0, 1, 200, 509, 510, 511):
        states_BLD = texts([length, 509]) if length <= 509 else texts([length])
        rows = network_text(merge_text_padding(small_transformer(0, 1)), states_BLD)
        bias_L = row_bias(rows, dtype)[0, 0, 0].double()
        assert bias_L[:length].count_nonzero() == 0
        weight = bias_L[length:].exp().sum().item()
        assert weight == pytest.approx(512 - length, rel=error if length < 510 else 1e-4)


@pytest.mark.parametrize("lengths", [LENGTHS, [509, 3], [511, 512], [1]], ids=str)
@torch.no_grad()
def test_outputs_equal_those_with_512_rows(lengths: list[int]) -> None:
    model = small_transformer(0)
    stock = outputs(model, lengths)
    torch.testing.assert_close(outputs(merge_text_padding(model), lengths), stock, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["1.3B", "14B"])
@torch.no_grad()
def test_outputs_of_published_shapes_equal_those_with_512_rows(config: dict) -> None:
    torch.manual_seed(0)
    model = WanTransformer3DModel.from_config(config | {"num_layers": 1})
    model.proj_out.weight.normal_(std=0.02)
    stock = outputs(model, [9, 60])
    torch.testing.assert_close(outputs(merge_text_padding(model), [9, 60]), stock, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_bf16_outputs_are_as_near_to_float32_as_with_512_rows() -> None:
    exact = outputs(small_transformer(0), LENGTHS)
    whole, merged = (small_transformer(0).to(torch.bfloat16) for _ in range(2))
    errors = [(outputs(m, LENGTHS) - exact).norm() for m in (whole, merge_text_padding(merged))]
    assert errors[1] < 1.2 * errors[0]


def test_gradients_of_all_weights_equal_those_with_512_rows() -> None:
    plain, merged = small_transformer(0), merge_text_padding(small_transformer(0))
    for model in (plain, merged):
        outputs(model, LENGTHS).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), merged.parameters(), strict=True):
        # key biases move all logits of a head alike, so that their gradient is 0 but for rounding
        torch.testing.assert_close(q.grad, p.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("passes", [1, 2])
@torch.no_grad()
def test_guidance_equals_that_with_512_rows_when_the_negative_prompt_is_longer(passes: int) -> None:
    x_t_BCFHW, text_BLD = keyed_normal((3, 16, 1, 8, 8), "x"), texts([2, 5, 9])
    batch = state(x_t_BCFHW, torch.rand(3), text_BLD)
    guidance = Guidance(texts([126])[0], dict.fromkeys(Expert, 4.0))

    def guided(model: WanTransformer3DModel) -> Tensor:
        teacher = LocalTeacher(dict.fromkeys(Expert, Network(model)))
        return GuidedTeacher(teacher, guidance, passes).velocity(batch)

    plain, merged = guided(small_transformer(0)), guided(merge_text_padding(small_transformer(0)))
    torch.testing.assert_close(merged, plain, atol=1e-4, rtol=1e-5)


def test_a_prompt_costs_its_own_rows_and_no_padding() -> None:
    model, seen = merge_text_padding(small_transformer(0)), []
    attend = model.blocks[0].attn2.to_k.register_forward_hook
    attend(partial(lambda seen, module, inputs, _: seen.append(inputs[0].shape[1]), seen))
    outputs(model, LENGTHS)
    assert seen == [max(LENGTHS) + STAND_INS]
    assert math.isfinite(outputs(model, LENGTHS).sum().item())
