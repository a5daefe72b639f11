"""A Wan of two times: with r = t the Wan itself, and what diffusers' AnyFlowTransformer3DModel computes."""

import inspect
from dataclasses import replace

import pytest
import torch
from diffusers import AnyFlowTransformer3DModel
from small_wan import small_transformer
from torch import Tensor

from wandistiller.batch import Conditioning, State
from wandistiller.experts import Expert
from wandistiller.network.network import Network
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.transformer_config import TransformerConfig

T_B, R_B = torch.tensor([0.9, 0.4]), torch.tensor([0.0, 0.4])
FLOW_MAP_KEYS = inspect.signature(AnyFlowTransformer3DModel.__init__).parameters


def states(end_B: Tensor | None = None, *, first: bool = False) -> State:
    x_BCFHW = keyed_normal((2, 16, 3, 4, 4), "x")
    conditioning = Conditioning(keyed_normal((2, 512, 32), "text"))
    if first:
        conditioning = replace(conditioning, first_BCFHW=keyed_normal((2, 16, 1, 4, 4), "first"))
    return State(
        x_t_BCFHW=x_BCFHW,
        sigma_B=T_B,
        end_B=end_B,
        conditioning=conditioning,
        expert=Expert.HIGH_NOISE,
    )


@pytest.fixture(scope="module")
def pair() -> tuple[Network, Network]:
    """A Wan, and the flow map that begins as it."""
    model = small_transformer(1, 2)
    config, weights = TransformerConfig.of(model.config), list(model.named_parameters())
    return Network.made(config, weights), Network.made(config.with_second_time(), weights)


@torch.no_grad()
def test_at_r_equal_to_t_a_new_flow_map_is_its_wan_bit_for_bit(pair: tuple[Network, Network]) -> None:
    wan, flow_map = pair
    expected, of_clips = wan.velocity(states()), wan.velocity(states(first=True))
    assert torch.equal(flow_map.velocity(states()), expected)
    assert torch.equal(flow_map.velocity(states(T_B)), expected)
    assert torch.equal(flow_map.velocity(states(first=True)), of_clips)
    elsewhere = flow_map.velocity(states(R_B))
    assert not torch.allclose(elsewhere[0], expected[0], atol=1e-3)  # another r than t counts, but that alone
    assert torch.equal(elsewhere[1], expected[1])


@torch.no_grad()
@pytest.mark.parametrize("first", [False, True])
def test_it_computes_what_diffusers_computes(pair: tuple[Network, Network], first: bool) -> None:
    flow_map = Network.made(pair[1].config, pair[1].module.state_dict().items())
    for name, p in flow_map.module.condition_embedder.delta_embedder.named_parameters():
        p.add_(0.1 * keyed_normal(p.shape, name))
    known = {key: value for key, value in flow_map.config.raw.items() if key in FLOW_MAP_KEYS}
    theirs = AnyFlowTransformer3DModel(**known)
    theirs.load_state_dict(flow_map.module.state_dict())
    given = states(R_B, first=first)
    t_BF, r_BF = (1000 * level_B[:, None].expand(2, 3).clone() for level_B in (T_B, R_B))
    if first:
        t_BF[:, 0] = 0
    v_BFCHW = theirs(
        hidden_states=given.conditioning.with_given(given.x_t_BCFHW).transpose(1, 2),
        timestep=t_BF,
        r_timestep=r_BF,
        encoder_hidden_states=given.conditioning.text_BLD,
        return_dict=False,
    )[0]
    expected = given.conditioning.without_given(v_BFCHW.transpose(1, 2))
    torch.testing.assert_close(flow_map.velocity(given), expected, rtol=1e-5, atol=1e-5)


def test_it_is_told_from_a_wan_by_its_config_alone(pair: tuple[Network, Network]) -> None:
    wan, flow_map = (network.config for network in pair)
    assert flow_map.one_time == wan.raw and flow_map.raw != wan.raw
    assert flow_map.shapes.keys() - wan.shapes.keys() == {
        f"condition_embedder.delta_embedder.linear_{n}.{leaf}" for n in (1, 2) for leaf in ("weight", "bias")
    }
    again = TransformerConfig.of(flow_map.raw | {"gate_value": 0.5}).with_second_time()
    assert again.gate_value == 0.5
