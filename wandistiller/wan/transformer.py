"""A Wan transformer: its velocity, its rope tables."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from wandistiller.batch import State
from wandistiller.flow import TRAIN_TIMESTEPS
from wandistiller.wan.text_padding import network_text
from wandistiller.wan.two_times import TwoTimes


def renew_rope(model: WanTransformer3DModel, device: torch.device | None = None) -> None:
    """Make the rope tables of `model` again, in float32, on `device` or torch's default one.

    zero.Init builds float tables in its own dtype (deepspeed 0.19.8): in bf16 cos is off by up to 2.0 at 1024
    positions.
    tests/unit/wan/test_transformer.py::test_rope_tables_survive_every_engine.
    """
    c = model.config
    model.rope = type(model.rope)(c.attention_head_dim, c.patch_size, c.rope_max_seq_len).to(device)


def share_rope(model: WanTransformer3DModel, other: WanTransformer3DModel) -> None:
    """Give `model` the rope tables of another network of its config, where that computes."""
    model.rope = other.rope


def called_in_turn(model: WanTransformer3DModel) -> list[nn.Module]:
    """Return the modules that have nearly all weights, in the order of their calls."""
    return [model.condition_embedder, *model.blocks]


def velocity(model: nn.Module, state: State, call: Callable[..., Any] | None = None) -> Tensor:
    """Call a WanTransformer3DModel as `NetworkConfig.velocity` says."""
    dtype, conditioning = model.patch_embedding.weight.dtype, state.conditioning
    inputs = [conditioning.with_given(state.x_t_BCFHW), conditioning.joined_BCFHW]
    image: dict[str, Tensor] = {}
    if (image_BLD := conditioning.image_BLD) is not None:
        if model.config.pos_embed_seq_len:  # diffusers takes those of two frames one after the other
            image_BLD = image_BLD.unflatten(1, (2, -1)).flatten(0, 1)
        image["encoder_hidden_states_image"] = image_BLD.to(dtype)
    v_BCFHW = (call or model)(
        hidden_states=torch.cat([x_BCFHW.to(dtype) for x_BCFHW in inputs if x_BCFHW is not None], dim=1),
        timestep=_timestep(model, state),
        encoder_hidden_states=network_text(model, conditioning.text_BLD.to(dtype)),
        **image,
        return_dict=False,
    )[0].float()
    return conditioning.without_given(v_BCFHW)


def _timestep(model: nn.Module, state: State) -> Tensor:
    """Return t_B = 1000 sigma; where the first frame is given t_BS of each patch, 0 of that frame's.

    Those of the noise levels where the velocities lead follow for a flow map, equal for all patches, as in
    diffusers' AnyFlowPipeline (0.42.1).
    """
    has_ends = state.end_B is not None and isinstance(model.condition_embedder, TwoTimes)
    levels = [state.sigma_B, *([state.end_B] if has_ends else [])]
    precision = torch.promote_types(state.sigma_B.dtype, torch.float32)
    times = torch.cat([(level_B.to(precision) * TRAIN_TIMESTEPS).float() for level_B in levels])
    if state.conditioning.first_BCFHW is None:
        return times
    frames, *sides = (n // p for n, p in zip(state.x_t_BCFHW.shape[2:], model.config.patch_size, strict=True))
    t_BFP = times[:, None, None].repeat(1, frames, prod(sides))
    t_BFP[: len(state.sigma_B), 0] = 0
    return t_BFP.flatten(1)
